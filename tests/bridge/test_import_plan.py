"""A dry run says what an import does, from headers alone."""

import json

import jax
import numpy as np
import pytest
from bridge_helpers import like_of, random_tensors, write_llama
from helpers.errors import facts
from jax.sharding import NamedSharding, PartitionSpec

import bridge


def total_bytes() -> int:
    return sum(tensor.nbytes for tensor in random_tensors(np.float32).values())


def test_every_tensor_has_its_leaf_and_its_bytes_and_none_is_read(llama, bytes_read):
    plan = bridge.plan(llama)
    assert bytes_read == []
    assert plan.nbytes == total_bytes() and plan.bytes_read == {0: total_bytes()}
    tensors = [name for leaf in plan.leaves for name in leaf.tensors]
    assert sorted(tensors) == sorted(random_tensors(np.float32))


def test_the_table_folds_layers_and_shows_layouts(llama):
    table = str(bridge.plan(llama))
    row = next(line for line in table.splitlines() if "q_proj.kernel" in line)
    assert "3x48x8x16" in row and "model.layers.{0-2}.self_attn.q_proj.weight" in row
    assert row.endswith("(heads head_dim) embed -> embed heads head_dim")


def test_an_abstract_tree_decides_dtype_and_what_each_process_reads(llama, bytes_read):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    config = bridge.from_hf_config(llama)

    def shard(leaf):
        spec = [None] * (leaf.ndim - 1) + ["x" if leaf.shape[-1] % 8 == 0 else None]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, jax.numpy.bfloat16, sharding=sharding)

    like = jax.tree.map(shard, like_of(config))
    plan = bridge.plan(llama, like)
    assert {str(leaf.dtype) for leaf in plan.leaves} == {"bfloat16"}
    bridge.load_hf(llama, like)
    assert plan.bytes_read == {0: sum(bytes_read)}


def test_what_is_left_out_is_said(tmp_path):
    tensors = random_tensors(np.float32)
    for layer in range(3):
        key = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        tensors[key] = np.ones(8, np.float32)
    path = write_llama(tmp_path / "in", tensors=tensors)
    plan = bridge.plan(path)
    assert len(plan.left_out) == 3
    assert "left out: model.layers.{0-2}.self_attn.rotary_emb.inv_freq" in str(plan)


def test_it_is_json(llama):
    data = json.loads(json.dumps(bridge.plan(llama).as_dict()))
    assert data["bytes"] == total_bytes() and len(data["leaves"]) == 12


def test_what_does_not_fit_is_the_error_of_the_import(tmp_path):
    tensors = random_tensors(np.float32)
    del tensors["model.norm.weight"]
    path = write_llama(tmp_path / "in", tensors=tensors)
    with pytest.raises(ValueError, match=facts("model.norm.weight", "(1)")):
        bridge.plan(path)
