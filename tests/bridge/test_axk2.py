"""A.X K2: names of its tensors, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from bridge_helpers import assert_same_leaves, like_of, tensors_of
from helpers.errors import facts
from safetensors.numpy import save_file
from tiny_configs import hf_fields

import bridge
from bridge.families import FAMILIES
from bridge.megatron import to_transformer_config
from bridge.models import DecoderConfig, MLAConfig

FIELDS = hf_fields("axk2", num_hidden_layers=2)
GATE = "model.layers.0.input_layernorm.W_down.weight"


def config_of(**changes) -> DecoderConfig:
    return bridge.from_hf_config(FIELDS | changes)


@pytest.mark.parametrize("way", range(2))
def test_all_names_are_read_and_published_ones_written(tmp_path, way):
    config, values = config_of(), np.random.default_rng(0)
    mapping = FAMILIES["axk2"].mappings(config)[way]
    shapes = {n: p[0].source_shape for n, p in mapping.by_source().items()}
    tensors = {n: values.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    assert (GATE in tensors) == (way == 0)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    params = bridge.load_hf(tmp_path, like_of(config))
    bridge.save_hf(tmp_path / "out", params, config)
    assert GATE in tensors_of(tmp_path / "out")
    again = bridge.load_hf(tmp_path / "out", like_of(config))
    assert_same_leaves(again, params)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"n_group": 2, "topk_group": 1}, ("n_group", 2)),
        ({"gated_norm_rank": 0}, ("norm_gate_rank", 0)),
        ({"q_lora_rank": None}, ("gated_queries", "q_lora_rank")),
        ({"moe_layer_freq": 2}, ("moe_layer_freq", 2)),
    ],
)
def test_what_is_not_modelled_is_refused(changes, said):
    with pytest.raises(ValueError, match=facts(*said)):
        config_of(**changes)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"norm_placement": "both"}, ("norm_gate_rank", "norm_placement")),
        ({"norm_bias": True}, ("norm_gate_rank", "norm_bias")),
        ({"attention_gate": True}, ("gated_queries", "attention_gate")),
    ],
)
def test_gates_stand_beside_no_others(changes, said):
    with pytest.raises(ValueError, match=facts(*said)):
        dataclasses.replace(config_of(), **changes)


def test_gated_queries_have_a_latent_vector():
    with pytest.raises(ValueError, match=facts("gated_queries", "q_lora_rank")):
        MLAConfig(8, 4, 4, 8, gated_queries=True)


def test_megatron_has_no_such_model():
    with pytest.raises(ValueError, match=facts("norm_gate_rank", "indexer")):
        to_transformer_config(config_of())
