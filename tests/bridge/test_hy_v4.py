"""Hy 4: names of its tensors, defaults of its layers, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bridge_helpers import assert_same_leaves, like_of, tensors_of
from flax import nnx
from helpers.errors import facts
from safetensors.numpy import save_file
from tiny_configs import hf_fields

import bridge
from bridge.families import FAMILIES
from bridge.megatron import to_transformer_config
from bridge.models import Decoder, DecoderConfig
from bridge.models._hyper_connections import HyperConnection

# A layer with an MLP and one with experts, each with an indexer.
FIELDS = hf_fields(
    "hy_v4",
    num_hidden_layers=2,
    mlp_layer_types=["dense", "sparse"],
    indexer_types=["full", "full"],
)
GATE = "model.layers.0.self_attn.linear_gate.weight"


def config_of(**changes) -> DecoderConfig:
    return bridge.from_hf_config(FIELDS | changes)


@pytest.mark.parametrize("way", range(3))
def test_all_names_are_read(tmp_path, way):
    config, values = config_of(), np.random.default_rng(0)
    mapping = FAMILIES["hy_v4"].mappings(config)[way]
    shapes = {n: p[0].source_shape for n, p in mapping.by_source().items()}
    tensors = {n: values.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    assert (GATE in tensors) == (way < 2)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    params = bridge.load_hf(tmp_path, like_of(config))
    bridge.save_hf(tmp_path / "out", params, config)
    assert GATE in tensors_of(tmp_path / "out")
    again = bridge.load_hf(tmp_path / "out", like_of(config))
    assert_same_leaves(again, params)


def test_layers_that_predict_further_tokens_are_left_out_with_a_warning(tmp_path):
    config, further = config_of(), "model.mtp_layers.0.eh_proj.weight"
    shapes = FAMILIES["hy_v4"].mapping(config).by_source()
    tensors = {n: np.zeros(p[0].source_shape, "f4") for n, p in shapes.items()}
    save_file(tensors | {further: np.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    with pytest.warns(UserWarning, match=facts(1, further)):
        bridge.load_hf(tmp_path, like_of(config))


def test_every_fourth_layer_has_an_indexer_where_the_file_does_not_say():
    names = ("indexer_types", "mlp_layer_types")
    fields = {name: value for name, value in FIELDS.items() if name not in names}
    config = bridge.from_hf_config(fields | {"num_hidden_layers": 10})
    assert config.shared_indexer_layers == (2, 3, 4, 6, 7, 8)
    assert config.dense_layers == (0,)
    written = bridge.to_hf_config(config)
    assert written["indexer_types"].count("full") == 4


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"indexer_types": ["full", "half"]}, ("indexer_types", "'half'")),
        ({"indexer_types": ["shared", "full"]}, ("shared_indexer_layers", 0)),
        ({"swiglu_limit": 0.0}, ("swiglu_limit", 0.0)),
        ({"swiglu_limit": None}, ("swiglu_limit", None)),
        ({"hc_mult": 1}, ("num_streams", 1)),
        ({"hc_eps": -1.0}, ("eps", -1.0)),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'")),
        ({"n_shared_experts": 0}, ("n_shared_experts", 0)),
        ({"layer_types": ["full_attention"] * 2}, ("layer_types",)),
    ],
)
def test_what_is_not_modelled_is_refused(changes, said):
    with pytest.raises(ValueError, match=facts(*said)):
        config_of(**changes)


def test_there_are_as_many_keys_as_queries_whatever_the_file_says():
    fields = {k: v for k, v in FIELDS.items() if k != "num_key_value_heads"}
    assert bridge.from_hf_config(fields).num_key_value_heads == 4
    assert config_of(num_key_value_heads=2) == config_of()


def test_streams_begin_as_in_transformers():
    model = Decoder(config_of(), rngs=nnx.Rngs(0))
    first = next(
        module.projection
        for _, module in nnx.iter_modules(model)
        if isinstance(module, HyperConnection)
    )
    count = config_of().hyper_connections.num_streams
    np.testing.assert_allclose(first.scale[...], 0.01)
    np.testing.assert_allclose(first.base[...][..., :count], -np.log(count - 1))
    np.testing.assert_array_equal(first.base[...][..., count:], 0.0)


def test_megatron_has_no_such_model():
    said = ("hyper_connections", "indexer", "attention_gate")
    with pytest.raises(ValueError, match=facts(*said)):
        to_transformer_config(config_of())
