"""The mean of checkpoints is numpy's, whatever they are read from and written as."""

import ml_dtypes
import numpy as np
import pytest
from bridge_helpers import random_tensors, tensors_of, write_llama
from helpers.errors import facts

import bridge

# A float32 sum of two products, against the same in float64.
ROUNDING = 2e-7


@pytest.fixture
def pair(tmp_path):
    first = random_tensors(np.float32)
    second = {key: values[::-1] + 1 for key, values in first.items()}
    second = {key: np.ascontiguousarray(values) for key, values in second.items()}
    write_llama(tmp_path / "a", tensors=first)
    write_llama(tmp_path / "b", tensors=second)
    return first, second


def test_the_mean_is_that_of_numpy(pair, tmp_path):
    (a, config), (b, _) = (bridge.lazy_hf(tmp_path / name) for name in "ab")
    bridge.save_hf(tmp_path / "out", bridge.merge([a, b], [0.75, 0.25]), config)
    found = tensors_of(tmp_path / "out")
    for key, values in found.items():
        want = 0.75 * pair[0][key].astype(np.float64) + 0.25 * pair[1][key]
        np.testing.assert_allclose(values, want, rtol=ROUNDING, atol=ROUNDING)


def test_a_weight_of_one_is_the_checkpoint_itself(pair, tmp_path):
    (a, config), (b, _) = (bridge.lazy_hf(tmp_path / name) for name in "ab")
    bridge.save_hf(tmp_path / "out", bridge.merge([a, b], [0, 1]), config)
    for key, values in tensors_of(tmp_path / "out").items():
        assert values.tobytes() == pair[1][key].tobytes(), key


def test_formats_are_mixed_and_sums_are_rounded_once(tmp_path):
    """bfloat16 has 8 bits: a sum in it would lose the third addend, 2^-9, twice."""
    ones = {k: np.ones_like(v) for k, v in random_tensors(np.float32).items()}
    for name, value in (("a", 1.0), ("b", 1 + 2**-7), ("c", 1 + 2**-6)):
        tensors = {k: (v * value).astype(ml_dtypes.bfloat16) for k, v in ones.items()}
        write_llama(tmp_path / name, tensors=tensors)
    trees = [bridge.lazy_hf(tmp_path / name) for name in "abc"]
    bridge.save_megatron(tmp_path / "megatron", *trees[1])
    config = trees[0][1]
    trees[1] = bridge.megatron.lazy_megatron(tmp_path / "megatron", config)
    mean = bridge.merge([tree for tree, _ in trees])
    bridge.save_megatron(tmp_path / "out", mean, config, format="fsdp_dtensor")
    found = bridge.megatron.open_megatron(tmp_path / "out").source
    values = found.read("decoder.final_layernorm.weight")
    assert values.dtype == ml_dtypes.bfloat16
    assert set(values.astype(np.float64)) == {1 + 2**-7}


@pytest.mark.parametrize(
    "weights", [[1, 1], [0.5], [0.5, 0.25, 0.25], [float("nan"), 1], [float("inf"), 1]]
)
def test_weights_that_do_not_add_up_are_refused(pair, tmp_path, weights):
    trees = [bridge.lazy_hf(tmp_path / name)[0] for name in "ab"]
    with pytest.raises(ValueError, match=facts(f"{len(weights)} weights", "2 trees")):
        bridge.merge(trees, weights)


def test_other_models_are_refused_leaf_by_leaf():
    a = {"x": np.zeros((2, 3), np.float32), "y": np.zeros(2, np.float32)}
    b = {"x": np.zeros((3, 2), np.float32), "z": np.zeros(2, np.float32)}
    with pytest.raises(ValueError, match=facts("(3, 2)", "(2, 3)", "y", "z")):
        bridge.merge([a, b])


def test_integers_that_differ_have_no_mean():
    a, b = {"n": np.array([1, 2], np.int32)}, {"n": np.array([1, 3], np.int32)}
    assert (bridge.merge([a, a])["n"][(slice(None),)] == [1, 2]).all()
    with pytest.raises(ValueError, match=facts("'n'", "int32")):
        bridge.merge([a, b])["n"][(slice(None),)]
