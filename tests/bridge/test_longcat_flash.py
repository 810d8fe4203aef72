"""LongCat-Flash: experts that compute nothing, and files with and without them."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from bridge_helpers import assert_same_bytes, load_model, logits_of, tensors_of
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields
from tiny_models import HFModel, make_model

import bridge
from bridge.models._moe import sorted_dispatch
from fsdp_jax import ops
from fsdp_jax.cli._routing import CountingDecoder

pytestmark = pytest.mark.torch

# The largest difference over the largest logit; as in test_logits.py.
RELATIVE = 2e-5
REMOTE = {"auto_map": {"AutoModelForCausalLM": "modeling.LongcatFlashForCausalLM"}}
ZEROS: dict[str, Any] = {"zero_expert_num": 4}


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> HFModel:
    return make_model(tmp_path_factory.mktemp("longcat"), "longcat_flash", **ZEROS)


@pytest.fixture(scope="module")
def model(hf):
    return load_model(hf.path)


def test_experts_that_compute_nothing_return_the_token(hf, model):
    _, stats = model.with_router_stats(jnp.asarray(hf.tokens))
    chosen = np.asarray(stats.tokens_per_expert).sum((0, 1))
    assert chosen.shape == (12,)
    assert chosen[8:].sum() > 0
    ours = logits_of(model, hf.tokens)
    assert np.abs(ours - hf.logits).max() <= RELATIVE * np.abs(hf.logits).max()


def test_an_export_has_no_weights_of_experts_that_compute_nothing(hf, model, tmp_path):
    bridge.save_hf(tmp_path, nnx.state(model, nnx.Param), model.config)
    unused = tuple(f"mlp.experts.{number}." for number in range(8, 12))
    held = tensors_of(hf.path)
    read = {
        name: tensor
        for name, tensor in held.items()
        if not any(part in name for part in unused)
    }
    # A gate and an up projection, in two layers.
    assert len(held) - len(read) == 2 * 2 * len(unused)
    assert_same_bytes(tensors_of(tmp_path), read)


def test_texts_of_a_packed_row_do_not_see_each_other(hf, model):
    tokens = jnp.asarray(hf.tokens[:1, :20])
    ids = jnp.asarray([[0] * 12 + [1] * 8])
    packed = model(tokens, segment_ids=ids)
    alone = model(tokens[:, 12:])
    assert np.abs(packed[:, 12:] - alone).max() <= RELATIVE * np.abs(alone).max()
    assert np.abs(model(tokens)[:, 12:] - alone).max() > 0.1


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_hidden_layers": 3}, ("num_hidden_layers", "3", "num_layers", "2", "4")),
        ({"router_bias": True}, ("router_bias", "True")),
        ({"zero_expert_type": "copy", **REMOTE}, ("zero_expert_type", "'copy'")),
        ({"head_dim": 12}, ("head_dim", "12", "8")),
        ({"moe_topk": 13, **ZEROS}, ("num_experts_per_tok", "13")),
    ],
)
def test_a_field_that_says_otherwise_is_refused(changes, said):
    fields = {**hf_fields("longcat_flash"), **changes}
    with pytest.raises(ValueError, match=facts(*said)):
        bridge.from_hf_config(fields)


def test_choices_of_no_expert_move_biases_too():
    config = bridge.from_hf_config({**hf_fields("longcat_flash"), **ZEROS})
    assert config.moe is not None and config.moe.num_zero_experts
    decoder = CountingDecoder(config, rngs=nnx.Rngs(0))
    _, stats = decoder.with_router_stats(jnp.zeros((2, 8), jnp.int32))
    assert stats is not None
    decoder.count(stats)
    chosen = 2 * 8 * config.moe.num_experts_per_tok
    counts = decoder.tokens_per_expert[...]
    assert counts.shape[-1] == config.moe.num_choices
    assert (counts.sum(-1) == chosen).all()


def test_both_attentions_of_a_layer_may_be_counted():
    fields = hf_fields("longcat_flash")
    assert "num_hidden_layers" not in fields
    counted = bridge.from_hf_config({**fields, "num_hidden_layers": 4})
    assert counted == bridge.from_hf_config(fields)


@pytest.mark.parametrize(
    "dispatch",
    [
        sorted_dispatch,
        ops.expert_parallel_dispatch,
        functools.partial(ops.expert_capacity_dispatch, capacity_factor=1.0),
    ],
)
def test_a_choice_of_no_expert_adds_nothing_and_is_not_dropped(dispatch):
    x, chosen = jnp.asarray([[1.0], [2.0], [3.0]]), jnp.asarray([[0], [2], [1]])

    def run(rows, group_sizes):
        del group_sizes
        return 10 * rows

    weights = jnp.asarray([[1.0], [0.0], [1.0]])
    y, dropped = dispatch(run, x, chosen, weights, 2)
    assert y[:, 0].tolist() == [10, 0, 30]
    assert dropped.tolist() == [0, 0, 0]
