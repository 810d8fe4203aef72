"""What `torch.save` writes is read without torch, lazily and to the bit."""

import argparse
import collections
from typing import Any

import jax
import numpy as np
import pytest
import torch
from helpers.errors import facts
from hypothesis import given, settings
from hypothesis import strategies as st

import bridge
from bridge.formats._torch_dtypes import DTYPES
from bridge.formats._torch_zip import open_torch_file, read_torch_file

pytestmark = pytest.mark.torch

SHAPE = (6, 4, 5)
VALUES = torch.arange(120, dtype=torch.float32).reshape(SHAPE)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Values as bits: numpy knows neither bfloat16 nor float8."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.dtype.is_complex:
        return tensor.contiguous().numpy()
    return tensor.contiguous().view(bits[tensor.element_size()]).numpy()


def assert_same(ours: np.ndarray, theirs: torch.Tensor) -> None:
    assert ours.shape == tuple(theirs.shape)
    assert f"torch.{DTYPES_BACK[ours.dtype]}" == str(theirs.dtype)
    assert np.ascontiguousarray(ours).tobytes() == to_numpy(theirs).tobytes()


DTYPES_BACK = {dtype: name for name, dtype in DTYPES.items()}


@pytest.mark.parametrize("lazily", [True, False])
def test_views_that_negate_or_conjugate_are_read_as_they_are(tmp_path, lazily):
    whole = torch.tensor([[1 + 2j, 3 - 4j]]).conj()
    state = {"conjugate": whole, "negative": torch.tensor([[5 + 6j, 7j]]).conj().imag}
    assert whole.is_conj() and state["negative"].is_neg()
    source: Any = state
    if lazily:
        source = tmp_path / "views.pt"
        torch.save(state, source)
    like = {
        "conjugate": jax.ShapeDtypeStruct((1, 2), "complex64"),
        "negative": jax.ShapeDtypeStruct((1, 2), "float32"),
    }
    rules = [bridge.Rule(name, name, "a b -> a b") for name in like]
    loaded = bridge.from_torch(source, like, rules)
    for name, tensor in state.items():
        np.testing.assert_array_equal(loaded[name], tensor.resolve_conj().resolve_neg())


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_read_as_torch_wrote_it(tmp_path, name):
    data = bytes(range(48))
    if name == "bool":
        data = bytes(byte % 2 for byte in data)
    tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, name))
    torch.save({"w": tensor}, tmp_path / "w.pt")
    source = open_torch_file(tmp_path / "w.pt")
    assert source.shape("w") == tuple(tensor.shape)
    assert source.dtype("w") == DTYPES[name]
    assert_same(source.read("w"), tensor)


VIEWS = {
    "whole": VALUES,
    "transposed": VALUES.permute(2, 0, 1),
    "cut": VALUES[1:4, :, 2:4],
    "every other": VALUES[::2, 1::2],
    "expanded": VALUES[0, :1].expand(3, 5),
    "scalar": VALUES[2, 3, 4],
    "empty": VALUES[:0],
}


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    file = tmp_path_factory.mktemp("views") / "views.pt"
    torch.save(VIEWS, file)  # one storage under all of them
    return open_torch_file(file)


@pytest.mark.parametrize("name", VIEWS)
def test_views_keep_their_strides(views, name):
    assert_same(views.read(name), VIEWS[name])


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["whole", "transposed", "cut", "every other"]), st.data())
def test_any_box_is_what_torch_would_slice(views, name, data):
    index = tuple(
        slice(*sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))))
        for n in VIEWS[name].shape
    )
    assert_same(views.read(name, index), VIEWS[name][index])


def test_the_second_read_of_a_range_is_exact(views, bytes_read):
    views.read("whole")  # the first verifies the storage
    bytes_read.clear()
    views.read("whole", (slice(2, 4),))
    assert sum(bytes_read) == 4 * 40


def test_opening_reads_no_tensor(tmp_path, bytes_read):
    torch.save({"w": torch.zeros(2**20)}, tmp_path / "w.pt")
    open_torch_file(tmp_path / "w.pt")
    assert 0 < sum(bytes_read) < 4096


def test_a_state_dict_of_a_module_is_named_as_in_torch(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    source = open_torch_file(tmp_path / "pytorch_model.bin")
    assert source.keys() == tuple(module.state_dict())
    for key, tensor in module.state_dict().items():
        assert_same(source.read(key), tensor)


def test_a_checkpoint_is_a_tree(tmp_path):
    shared = torch.nn.Parameter(torch.ones(2))
    checkpoint = {
        "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16),
        "model": collections.OrderedDict(weight=shared),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}, "betas": (0.9, 0.95)},
        "size": torch.Size([2, 3]),
        "raw": b"\x00\xff",
    }
    torch.save(checkpoint, tmp_path / "last.pt")
    tree = read_torch_file(tmp_path / "last.pt")
    assert tree["args"] == {"lr": 0.1, "dtype": DTYPES["bfloat16"]}
    assert tree["optimizer"]["betas"] == (0.9, 0.95)
    assert (tree["size"], tree["raw"]) == ((2, 3), b"\x00\xff")
    assert open_torch_file(tmp_path / "last.pt").keys() == (
        "model.weight",
        "optimizer.state.0.exp_avg",
    )


MARKED = {
    torch.nn.Parameter: b"_rebuild_parameter_with_state",
    torch.nn.Buffer: b"_rebuild_from_type_v2",
    torch.clone: b"_rebuild_from_type_v2",
}


@pytest.mark.parametrize("make, function", MARKED.items())
def test_tensors_with_attributes_are_tensors(tmp_path, make, function):
    """Megatron marks its parameters, and torch then names their type as well."""
    tensor = make(VALUES)
    tensor.tensor_model_parallel = True
    torch.save({"w": tensor}, tmp_path / "w.pt")
    assert function in (tmp_path / "w.pt").read_bytes()
    assert_same(open_torch_file(tmp_path / "w.pt").read("w"), tensor.detach())


def test_two_tensors_of_one_name_are_refused(tmp_path):
    torch.save({"a": {"b": VALUES}, "a.b": VALUES}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=facts("'a.b'")):
        open_torch_file(tmp_path / "w.pt")


def test_a_file_without_tensors_is_refused(tmp_path):
    torch.save({"a": 1}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=facts("w.pt'", "0 tensors")):
        open_torch_file(tmp_path / "w.pt")


def test_the_format_before_zip_is_refused_with_advice(tmp_path):
    torch.save({"w": VALUES}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=facts("1.6", "weights_only=True")):
        open_torch_file(tmp_path / "w.pt")


def test_a_pickled_module_is_refused_by_the_name_of_its_class(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "w.pt")
    with pytest.raises(ValueError, match=facts("'torch.nn.modules.linear.Linear'")):
        open_torch_file(tmp_path / "w.pt")


def test_a_file_saved_without_checksums_is_refused_with_advice(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": VALUES}, tmp_path / "w.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(
        ValueError, match=facts("torch.serialization.set_crc32_options(False)")
    ):
        open_torch_file(tmp_path / "w.pt").read("w")
