"""A checkpoint becomes another one without being held."""

import numpy as np
import pytest
from bridge_helpers import assert_same_bytes, random_tensors, tensors_of, write_llama
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge._box import Range
from bridge.hf._config import find_family
from bridge.streaming._lazy import lazy_tree


def opened(path):
    config = bridge.from_hf_config(path)
    source = bridge.open_checkpoint(path)
    return lazy_tree(source, find_family(config.model_type).mapping(config)), config


def test_nothing_is_read_before_it_is_asked_for(llama, bytes_read):
    tree, _ = opened(llama)
    assert bytes_read == []
    leaf = tree["layers.mlp.up_proj.kernel"]
    layer = leaf.read((Range(1, 2), Range(0, 48), Range(0, 10)))
    want = random_tensors(np.float32)["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(layer[0], want[:10].T)
    assert sum(bytes_read) == layer.nbytes


def test_a_lazy_tree_is_saved_as_an_array_would_be(llama, tmp_path, bytes_read):
    tree, config = opened(llama)
    bridge.save_hf(tmp_path / "out", tree, config, max_shard_bytes=40_000)
    tensors = random_tensors(np.float32)
    assert sum(bytes_read) == sum(tensor.nbytes for tensor in tensors.values())
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors)


def test_a_cast_on_the_way_is_the_cast_of_the_whole(llama, tmp_path):
    tree, config = opened(llama)
    bridge.save_hf(tmp_path / "out", tree, config, dtype=np.float16)
    want = {k: t.astype(np.float16) for k, t in random_tensors(np.float32).items()}
    assert_same_bytes(tensors_of(tmp_path / "out"), want)


def test_layers_of_several_dtypes_are_no_leaf(tmp_path):
    tensors = random_tensors(np.float32)
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key] = tensors[key].astype(np.float16)
    path = write_llama(tmp_path, tensors=tensors)
    with pytest.raises(
        ValueError, match=facts("layers.mlp.up_proj.kernel", "float16, float32")
    ):
        opened(path)


def test_a_checkpoint_of_another_model_is_refused(llama):
    config = bridge.from_hf_config(hf_fields("qwen3"))
    mapping = find_family("qwen3").mapping(config)
    with pytest.raises(
        ValueError, match=facts("(6)", "model.layers.{0-2}.self_attn.q_norm.weight")
    ):
        lazy_tree(bridge.open_checkpoint(llama), mapping)
