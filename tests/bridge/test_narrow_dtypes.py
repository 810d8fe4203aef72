"""A number that another dtype has not is refused, and does not become infinite."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bridge_helpers import like_of, random_tensors, tensors_of, write_llama
from helpers.errors import facts

import bridge
from bridge._cast import cast, check_range
from fsdp_jax.cli import main

LARGE = 70_000.0  # float16 ends at 65,504
KEY = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def large(tmp_path):
    tensors = random_tensors(ml_dtypes.bfloat16)
    tensors[KEY][3, 5] = LARGE
    return write_llama(tmp_path / "large", ml_dtypes.bfloat16, tensors=tensors)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_load_into_a_narrower_dtype_is_refused(large, devices):
    like = like_of(bridge.from_hf_config(large), jnp.float16)
    mesh = jax.make_mesh((devices,), ("dp",), devices=jax.devices()[:devices])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), like
    )
    with pytest.raises(ValueError, match=facts(KEY, "70144", "65504", "float16")):
        bridge.load_hf(large, like)


def test_an_export_and_an_edit_to_a_narrower_dtype_are_refused(large, tmp_path, capsys):
    like = like_of(bridge.from_hf_config(large), jnp.float32)
    params, config = bridge.load_hf(large, like), bridge.from_hf_config(large)
    with pytest.raises(ValueError, match=facts(KEY, "70144", "float16")):
        bridge.save_hf(tmp_path / "out", params, config, dtype="float16")
    words = ["edit", str(large), str(tmp_path / "edited"), "--cast", "*", "float16"]
    assert main(words) == 2
    assert KEY in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "edited").exists()
    bridge.save_hf(tmp_path / "out", params, config, dtype="bfloat16")
    assert float(tensors_of(tmp_path / "out")[KEY][3, 5]) == 70144


@pytest.mark.torch
def test_a_tree_in_pytorch_s_dtype_is_refused():
    import torch

    rules = [bridge.Rule("fc.weight", "kernel", "out in -> in out")]
    like = {"fc.weight": torch.zeros(2, 3, dtype=torch.float16)}
    tree = {"kernel": jnp.full((3, 2), LARGE)}
    with pytest.raises(ValueError, match=facts("fc.weight", "70000", "float16")):
        bridge.to_torch(tree, rules, like=like)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_infinite_and_largest_numbers_are_cast(dtype):
    largest = float(jnp.finfo(dtype).max)
    values = np.array([largest, -largest, np.nan, 0.0], np.float32)
    found = np.empty(4, jnp.dtype(dtype))
    cast(found, values, "x")
    np.testing.assert_array_equal(found.astype(np.float32), values)
    check_range(np.array([np.inf]), jnp.dtype("float16"), "x")
    for wide in ("float32", "bfloat16"):
        with pytest.raises(ValueError, match=facts("1e+39", "float64")):
            check_range(np.array([1e39]), jnp.dtype(wide), "x")
    with pytest.raises(ValueError, match=facts("'x'", dtype)):
        cast(found, values * 2, "x")
