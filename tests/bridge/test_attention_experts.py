"""Experts of attention: packed rows, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from bridge_helpers import load_model, logits_of
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields
from tiny_models import make_model

import bridge
from bridge.models import (
    AttentionExpertsConfig,
    Decoder,
    MultipliersConfig,
    tensor_parallel_rules,
)

pytestmark = pytest.mark.torch

# Two float32 programs that sum in other orders.
TOLERANCE = 2e-5


def test_texts_of_a_packed_row_do_not_see_each_other(tmp_path):
    written = make_model(tmp_path, "jetmoe")
    model = load_model(written.path)
    segments = np.repeat([[0] * 15 + [1] * 25], 2, axis=0)
    packed = logits_of(model, written.tokens, segment_ids=segments)[:, 15:]
    alone = logits_of(model, written.tokens[:, 15:])
    assert np.abs(packed - alone).max() <= TOLERANCE * np.abs(alone).max()


def test_ranks_share_experts_by_key_heads():
    config = bridge.from_hf_config(hf_fields("jetmoe"))
    rules = tensor_parallel_rules(config, 2)
    assert rules["layers.self_attn.q_experts"] == -2
    assert rules["layers.self_attn.o_experts"] == -3
    with pytest.raises(ValueError, match=facts("4", "num_key_value_heads 2")):
        tensor_parallel_rules(config, 4)


def test_a_layer_has_no_queries_but_those_of_experts():
    config = bridge.from_hf_config(hf_fields("jetmoe"))
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(jax.random.key(0))))
    attention = model.layers.self_attn
    assert attention.q_proj is None and attention.o_proj is None
    assert attention.q_experts.shape == (3, 6, 48, 2, 16)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_attention_heads": 6}, "num_attention_heads + 6 + 4"),
        ({"num_experts_per_tok": 7, "num_attention_heads": 14}, "7 + 6"),
        ({"activation_function": "tanh"}, "tanh"),
    ],
)
def test_a_field_that_says_otherwise_is_refused(changes: dict[str, Any], said):
    with pytest.raises(ValueError, match=facts(*said.split(" + "))):
        bridge.from_hf_config(hf_fields("jetmoe", **changes))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"qk_norm": "head"}, "attention_experts + qk_norm"),
        ({"attention_gate": True}, "attention_experts + attention_gate"),
        ({"clip_qkv": 8.0}, "attention_experts + clip_qkv"),
        ({"multipliers": MultipliersConfig()}, "attention_experts + multipliers"),
        ({"attention_experts": AttentionExpertsConfig(6, 1)}, "4 + 1 + 2"),
    ],
)
def test_what_experts_of_attention_do_not_have_is_refused(
    changes: dict[str, Any], said
):
    config = bridge.from_hf_config(hf_fields("jetmoe"))
    with pytest.raises(ValueError, match=facts(*said.split(" + "))):
        dataclasses.replace(config, **changes)


def test_more_experts_than_there_are_cannot_be_chosen():
    with pytest.raises(ValueError, match=facts("3", "2", "num_experts_per_tok")):
        AttentionExpertsConfig(2, 3)
