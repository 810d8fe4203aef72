"""Blocks that layers share: gradients, rows, copies in files, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bridge_helpers import load_model, logits_of, tensors_of
from flax import nnx
from helpers.errors import facts
from safetensors.numpy import save_file
from tiny_configs import hf_fields
from tiny_models import make_model
from transformers import AutoModelForCausalLM

import bridge
from bridge._tree import named_leaves
from bridge.families import FAMILIES
from bridge.models import (
    Decoder,
    DecoderConfig,
    Mamba1Config,
    SharedBlocksConfig,
    float8_product,
    tensor_parallel_rules,
)

pytestmark = pytest.mark.torch

# Two float32 programs that sum in other orders, and their gradients.
TOLERANCE, GRADIENTS = 2e-5, 1e-3
VARIANTS = ["zamba2", "zamba2-small", "zamba"]
# Name of a block in a layer of the file.
NAMES = {"zamba2": "shared_transformer", "zamba": "shared_transf"}


@pytest.fixture(scope="module", params=VARIANTS)
def written(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


def gradients_of_transformers(path, tokens: np.ndarray) -> dict[str, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.from_numpy(tokens)
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
    return {n: w.grad.numpy() for n, w in model.named_parameters()}


def gradients_of(model: Decoder, tokens: jax.Array) -> dict[str, np.ndarray]:
    """Gradients of the same loss, by the names of the file."""
    graph, params = nnx.split(model)

    def loss(params):
        logits = jax.nn.log_softmax(nnx.merge(graph, params)(tokens)[:, :-1])
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    leaves = named_leaves(jax.jit(jax.grad(loss))(params))
    mapping = FAMILIES[model.config.model_type].mapping(model.config)
    made: dict[str, np.ndarray] = {}
    for name, pieces in mapping.by_destination().items():
        for piece in pieces:
            whole = made.setdefault(piece.source, np.zeros(piece.source_shape, "f4"))
            own = np.asarray(leaves[name])[_slices(piece.destination_box)]
            whole[_slices(piece.source_box)] = piece.to_source(own)
    return made


def _slices(box) -> tuple[slice, ...]:
    return tuple(slice(r.start, r.stop) for r in box)


def test_gradients_are_the_sums_over_layers_of_transformers(written):
    tokens = np.where(written.tokens == 0, 1, written.tokens)  # 0 pads
    want = gradients_of_transformers(written.path, tokens)
    got = gradients_of(load_model(written.path), jnp.asarray(tokens))
    assert set(got) == set(want)
    want["model.embed_tokens.weight"][0] = got["model.embed_tokens.weight"][0]
    for name, grad in want.items():
        off = np.linalg.norm(got[name] - grad) / np.linalg.norm(grad)
        assert off <= GRADIENTS, name


def test_texts_of_a_packed_row_do_not_see_each_other(written):
    model = load_model(written.path)
    segments = np.repeat([[0] * 15 + [1] * 25], 2, axis=0)
    packed = logits_of(model, written.tokens, segment_ids=segments)[:, 15:]
    alone = logits_of(model, written.tokens[:, 15:])
    scale = np.abs(alone).max()
    assert np.abs(packed - alone).max() <= TOLERANCE * scale
    whole = logits_of(model, written.tokens)[:, 15:]
    assert np.abs(whole - alone).max() > 100 * TOLERANCE * scale


def test_parts_of_a_batch_are_as_all_rows_at_once(written):
    parts = load_model(written.path, batch_parts=2)
    got, want = logits_of(parts, written.tokens), written.logits
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


def copies(tensors: dict[str, np.ndarray], config: DecoderConfig):
    """Tensors of the last layer with a block, which has those of the first."""
    blocks = config.shared_blocks
    assert blocks is not None
    last = blocks.layers[-1]
    block = blocks.block_of(last)
    assert block is not None
    name = NAMES[config.model_type]
    first, own = (f"model.layers.{i}.{name}." for i in (blocks.layers[block], last))
    names = {key: key.replace(first, own) for key in tensors if first in key}
    return {copy: tensors[key].copy() for key, copy in names.items()}


def test_a_file_may_hold_the_block_in_each_layer(written, tmp_path):
    config, tensors = bridge.from_hf_config(written.path), tensors_of(written.path)
    again = copies(tensors, config)
    (tmp_path / "config.json").write_bytes((written.path / "config.json").read_bytes())
    save_file(tensors | again, tmp_path / "model.safetensors")
    assert set(bridge.plan(tmp_path).left_out) == set(again)
    got = logits_of(load_model(tmp_path), written.tokens)
    np.testing.assert_array_equal(
        got, logits_of(load_model(written.path), written.tokens)
    )
    name = next(key for key in again if key.endswith("input_layernorm.weight"))
    again[name][3] += 1
    save_file(tensors | again, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=facts("1", f"'{name}'")):
        bridge.plan(tmp_path)


OTHERS = ["hybrid", "full_attention"] * 2


@pytest.mark.parametrize(
    "variant, changes, said",
    [
        ("zamba2-small", {"tie_word_embeddings": None}, "tie_word_embeddings + None"),
        ("zamba2-small", {"layers_block_type": ["mamba"] * 4}, "'hybrid' + mamba2"),
        ("zamba2-small", {"layers_block_type": OTHERS}, "['full_attention']"),
        ("zamba2-small", {"num_hidden_layers": 5}, "4 + 5"),
        ("zamba2-small", {"num_mem_blocks": 4}, "num_blocks + 4 + 3"),
        ("zamba2-small", {"num_mem_blocks": 0}, "num_blocks + 0"),
        ("zamba2-small", {"hybrid_layer_ids": [0, 3]}, "[0, 3] + [0, 1, 3]"),
        ("zamba2-small", {"attention_hidden_size": 48}, "48 + 96"),
        ("zamba2-small", {"kv_channels": 24}, "kv_channels + 24 + 12"),
        ("zamba2-small", {"num_query_groups": 2}, "num_query_groups + 2 + 4"),
        ("zamba2-small", {"mamba_headdim": 12}, "n_mamba_heads + 4 + 12 + 48"),
        ("zamba2-small", {"use_long_context": True}, "use_long_context + True"),
        ("zamba2-small", {"use_conv_bias": False}, "use_conv_bias + False"),
        ("zamba2-small", {"adapter_rank": 0}, "mlp_rank + 0"),
        ("zamba", {"tie_word_embeddings": False}, "tie_word_embeddings + False"),
        ("zamba", {"layers_block_type": ["mamba"] * 7}, "'hybrid' + layers_block_type"),
        ("zamba", {"num_hidden_layers": 6}, "7 + 6"),
        ("zamba", {"attention_hidden_size": 48}, "48 + 96"),
        ("zamba", {"n_mamba_heads": 5}, "num_heads 5 + 96"),
        ("zamba", {"hidden_mamba_act": "gelu"}, "hidden_mamba_act + gelu"),
        ("zamba", {"head_dim": 12, "attention_head_dim": 24}, "head_dim + 12 + 24"),
        ("zamba-biased", {"num_hidden_layers": 2}, "3 + 2"),
        ("zamba-biased", {"attn_layer_period": 0}, "attn_layer_period 0"),
        ("zamba2", {"num_key_value_heads": 2}, "num_key_value_heads + 2 + 4"),
        ("zamba2", {"attention_head_dim": 12}, "4 + 12 + 96"),
        ("zamba2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor + 0.5"),
        ("zamba2", {"head_dim": 12, "attention_head_dim": 24}, "head_dim + 12 + 24"),
    ],
)
def test_a_field_that_says_otherwise_is_refused(variant, changes, said):
    with pytest.raises(ValueError, match=facts(*said.split(" + "))):
        bridge.from_hf_config(hf_fields(variant, **changes))


def test_other_heads_than_two_streams_have_are_read_without_adapters():
    fields = hf_fields("zamba2-small", attention_head_dim=10)
    config = bridge.from_hf_config(fields)
    assert (config.head_dim, config.query_pre_attn_scalar) == (10, 5.0)
    assert bridge.to_hf_config(config)["attention_head_dim"] == 10


def test_the_layers_with_a_block_follow_from_a_period_behind_the_first_three():
    from transformers import ZambaConfig

    fields = hf_fields("zamba", num_hidden_layers=76)
    del fields["layers_block_type"]
    blocks = bridge.from_hf_config(fields).shared_blocks
    types = ZambaConfig().layers_block_type
    assert blocks is not None and types is not None
    assert list(blocks.layers) == [i for i, t in enumerate(types) if t == "hybrid"]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_heads": 5}, "num_heads 5 + num_channels 96"),
        ({"num_heads": 0}, "num_heads + 0"),
        ({"num_heads": 2, "norm": True}, "num_heads + norm"),
    ],
)
def test_heads_that_a_mixer_cannot_have_are_refused(changes: dict[str, Any], said):
    with pytest.raises(ValueError, match=facts(*said.split(" + "))):
        Mamba1Config(96, 10, 3, **changes)


def test_the_54_layers_of_a_file_that_lists_none_are_those_of_transformers():
    from transformers import Zamba2Config

    fields = hf_fields("zamba2", num_hidden_layers=54)
    del fields["layers_block_type"]
    blocks = bridge.from_hf_config(fields).shared_blocks
    assert blocks is not None
    assert list(blocks.layers) == Zamba2Config().hybrid_layer_ids


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_blocks": 3, "layers": (1, 2)}, "num_blocks + 3 + 2"),
        ({"num_blocks": 1, "layers": (2, 1)}, "(2, 1)"),
        ({"num_blocks": 1, "layers": (1, 1)}, "(1, 1)"),
        ({"num_blocks": 1, "layers": (1,), "attention_rank": 0}, "attention_rank + 0"),
    ],
)
def test_blocks_that_layers_cannot_share_are_refused(changes, said):
    with pytest.raises(ValueError, match=facts(*said.split(" + "))):
        SharedBlocksConfig(**changes)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"shared_blocks": SharedBlocksConfig(1, (4,))}, "shared_blocks.layers + [4]"),
        ({"shared_blocks": SharedBlocksConfig(1, (-1,))}, "shared_blocks.layers + -1"),
        ({"qk_norm": "head"}, "shared_blocks + qk_norm"),
        ({"multipliers": bridge.models.MultipliersConfig()}, "multipliers"),
        ({"norm_scale": False}, "shared_blocks + norm_scale"),
        ({"mamba": None}, "shared_blocks + mamba + mamba1"),
        ({"mamba1": Mamba1Config(96, 10, 3)}, "shared_blocks + mamba + mamba1"),
        ({"gated_mlp": False}, "shared_blocks + gated_mlp"),
        ({"norm_placement": "both", "mixer_only_layers": ()}, "shared_blocks + 'both'"),
    ],
)
def test_what_layers_with_a_block_do_not_have_is_refused(changes: dict[str, Any], said):
    config = bridge.from_hf_config(hf_fields("zamba2-small"))
    with pytest.raises(ValueError, match=facts(*said.split(" + "))):
        dataclasses.replace(config, **changes)


def test_a_block_is_not_multiplied_in_two_precisions():
    config = bridge.from_hf_config(hf_fields("zamba2"))

    def make(start: int) -> Decoder:
        options = {"product": float8_product, "num_layers_at_start_in_bf16": start}
        return Decoder(config, rngs=nnx.Rngs(0), **options)

    model = nnx.eval_shape(lambda: make(1))
    assert model.shared_blocks is not None
    block = model.shared_blocks[0]
    linears = (block.self_attn.q_proj, block.self_attn.o_proj, block.mlp.up_proj)
    assert {linear.product for linear in linears} == {float8_product}
    with pytest.raises(ValueError, match=facts("(1, 2, 4, 5)", "2")):
        nnx.eval_shape(lambda: make(2))


def test_heads_of_blocks_that_ranks_do_not_divide_are_refused_by_name():
    config = bridge.from_hf_config(hf_fields("zamba2", n_mamba_heads=6))
    said = ("3", "num_attention_heads", "4", "intermediate_size", "80")
    with pytest.raises(ValueError, match=facts(*said)):
        tensor_parallel_rules(config, 3)
