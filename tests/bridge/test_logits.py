"""The imported model is the model: its logits are those of transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bridge_helpers import abstract_model, load_model, logits_of
from flax import nnx
from tiny_llamas import LLAMA3_ROPE, VARIANTS, HFModel, hf_logits, make_llama
from transformers import AutoModelForCausalLM

import bridge
from bridge.models import DecoderLayer, RopeConfig, dot_product_attention

pytestmark = pytest.mark.torch

# Two float32 programs that sum in different orders; measured here: below 2e-6.
RELATIVE = 2e-5


@pytest.fixture(scope="session", params=list(VARIANTS))
def hf_model(request, tmp_path_factory) -> HFModel:
    path = tmp_path_factory.mktemp(request.param)
    return make_llama(path, **VARIANTS[request.param])


@pytest.fixture(scope="session")
def untied(tmp_path_factory) -> HFModel:
    return make_llama(tmp_path_factory.mktemp("one_untied"))


@pytest.fixture(scope="session")
def bf16(tmp_path_factory) -> HFModel:
    return make_llama(tmp_path_factory.mktemp("one_bf16"), dtype=torch.bfloat16)


def relative_error(ours, theirs) -> float:
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def test_logits_equal_those_of_transformers(hf_model: HFModel):
    model = load_model(hf_model.path)
    assert hf_model.logits.std() >= 1
    assert (
        relative_error(logits_of(model, hf_model.tokens), hf_model.logits) <= RELATIVE
    )


def test_packed_texts_read_as_if_each_were_alone(untied: HFModel):
    model = load_model(untied.path)
    segments = np.repeat([[0] * 15 + [1] * 25], 2, axis=0)
    packed = logits_of(model, untied.tokens, segment_ids=segments)
    alone = [
        logits_of(model, untied.tokens[:, :15]),
        logits_of(model, untied.tokens[:, 15:]),
    ]
    assert relative_error(packed, np.concatenate(alone, axis=1)) <= RELATIVE


def test_positions_shift_and_stretch_as_in_transformers(untied: HFModel):
    model = load_model(untied.path)
    positions = np.arange(40)[None].repeat(2, axis=0)
    assert (
        relative_error(
            logits_of(model, untied.tokens, positions=positions + 7), untied.logits
        )
        <= 1e-4
    )
    assert (
        relative_error(
            logits_of(model, untied.tokens, positions=positions * 2), untied.logits
        )
        > 1e-2
    )


@pytest.mark.parametrize("wrong", ["theta", "type"])
def test_a_wrong_rope_misses_by_a_hundredfold(tmp_path, wrong):
    hf = make_llama(tmp_path, rope_parameters=LLAMA3_ROPE)
    config = bridge.from_hf_config(tmp_path)
    rope = (
        dataclasses.replace(config.rope, rope_theta=10000.0)
        if wrong == "theta"
        else RopeConfig(config.rope.rope_theta)
    )
    model = abstract_model(dataclasses.replace(config, rope=rope))
    graph, mould = nnx.split(model)
    model = nnx.merge(graph, bridge.load_hf(tmp_path, mould))
    assert relative_error(logits_of(model, hf.tokens), hf.logits) > 100 * RELATIVE


def test_heads_paired_the_wrong_way_miss_by_a_hundredfold(untied: HFModel):
    def modulo(query, key, value, **kwargs):  # query i with key i % n_kv
        n_rep = query.shape[2] // key.shape[2]
        key, value = (jnp.tile(x, (1, 1, n_rep, 1)) for x in (key, value))
        return dot_product_attention(query, key, value, **kwargs)

    model = load_model(untied.path, attention=modulo)
    assert (
        relative_error(logits_of(model, untied.tokens), untied.logits) > 100 * RELATIVE
    )


def test_bf16_weights_compute_in_bf16_and_stay_close(bf16: HFModel):
    model = load_model(bf16.path, jnp.bfloat16)
    logits = logits_of(model, bf16.tokens)
    assert logits.dtype == jnp.bfloat16
    # bfloat16 rounds to 1 part in 256, some twenty roundings deep.
    assert relative_error(logits.astype(jnp.float32), bf16.logits) < 0.05


def test_compute_follows_the_weights_that_are_handed_in(untied: HFModel):
    model = load_model(untied.path)
    halved = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model)
    assert logits_of(halved, untied.tokens).dtype == jnp.bfloat16


class Negated(DecoderLayer):
    """Its weights are stored negated, and put right at entry."""

    def __call__(self, *args):
        return DecoderLayer.__call__(jax.tree.map(jnp.negative, self), *args)


def test_a_layers_weights_are_only_used_inside_its_own_call(untied: HFModel):
    model = load_model(untied.path)  # FSDP swaps the class to gather at entry
    model.layers = jax.tree.map(jnp.negative, model.layers)
    model.layers.__class__ = Negated
    assert relative_error(logits_of(model, untied.tokens), untied.logits) <= RELATIVE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_what_we_export(tmp_path, dtype):
    hf = make_llama(tmp_path / "in", dtype=getattr(torch, dtype), head_dim=16)
    config = bridge.from_hf_config(hf.path)
    model = load_model(hf.path, getattr(jnp, dtype))
    bridge.save_hf(tmp_path / "out", nnx.state(model), config, max_shard_bytes=50_000)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert again.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(hf_logits(again, hf.tokens), hf.logits)
