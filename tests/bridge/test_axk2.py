"""A.X K2: names of its tensors, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_helpers import (
    abstract_model,
    assert_same_leaves,
    like_of,
    tensors_of,
)
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
        ({"dense_branch": True}, ("norm_gate_rank", "dense_branch")),
        ({"attention_gate": True}, ("gated_queries", "attention_gate")),
    ],
)
def test_gates_stand_beside_no_others(changes, said):
    with pytest.raises(ValueError, match=facts(*said)):
        dataclasses.replace(config_of(), **changes)


def test_gated_queries_have_a_latent_vector():
    with pytest.raises(ValueError, match=facts("gated_queries", "q_lora_rank")):
        MLAConfig(8, 4, 4, 8, gated_queries=True)


def test_queries_and_gates_are_projected_once():
    config, tokens = config_of(), jnp.zeros((1, 8), jnp.int32)
    traced = jax.make_jaxpr(lambda m: m(tokens))(abstract_model(config))
    latent = 2 * config.mla.q_lora_rank
    heads = config.mla.qk_head_dim + config.mla.v_head_dim
    of_gates = rf"f32\[1,8,{config.num_attention_heads},{heads}\] = dot_general"
    assert f"{latent},{config.num_attention_heads},{heads}" in str(traced)
    assert len(re.findall(of_gates, str(traced))) == len(config.layer_stacks)


def test_adapters_have_the_names_of_modules():
    targets = bridge.lora_targets(config_of(), ["q_gate_proj", "fc1"])
    assert any("q_gate_proj" in path for path in targets)
    with pytest.raises(ValueError, match=facts("q_b_proj")):
        bridge.lora_targets(config_of(), ["q_b_proj"])


def test_megatron_has_no_gated_queries():
    latent = dataclasses.replace(
        bridge.from_hf_config(hf_fields("deepseek_v3", rms_norm_eps=1e-6)).mla,
        gated_queries=True,
    )
    config = bridge.from_hf_config(hf_fields("deepseek_v3", rms_norm_eps=1e-6))
    with pytest.raises(ValueError, match=facts("mla.gated_queries")):
        to_transformer_config(dataclasses.replace(config, mla=latent))


def test_megatron_has_no_such_model():
    with pytest.raises(ValueError, match=facts("norm_gate_rank", "indexer")):
        to_transformer_config(config_of())
