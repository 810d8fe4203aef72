"""Safetensors files are read to the byte, and damaged ones are refused."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.errors import facts
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import numpy as reference

import bridge
from bridge.formats._safetensors import DTYPES, encode_header

SHAPE = (6, 4, 5)
VALUES = np.arange(120, dtype=np.float32).reshape(SHAPE)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> bridge.Source:
    file = tmp_path_factory.mktemp("source") / "model.safetensors"
    reference.save_file({"pad": np.ones(3, np.float32), "w": VALUES}, file)
    return bridge.open_checkpoint(file)


ends = [st.tuples(st.integers(-1, n), st.integers(0, n + 2)) for n in SHAPE]


@settings(deadline=None, max_examples=60)
@given(st.tuples(*ends), st.integers(0, 3))
def test_any_box_is_what_numpy_would_slice(source, ranges, num_dims):
    index = tuple(slice(*r) for r in ranges[:num_dims])
    np.testing.assert_array_equal(source.read("w", index), VALUES[index])


@pytest.mark.parametrize(
    "index, elements",
    [
        ((), 120),
        ((slice(2, 4),), 40),  # rows are one range
        ((slice(2, 3), slice(1, 3)), 10),  # rows of one matrix as well
        ((slice(None), slice(1, 3)), 110),  # columns: from the first to the last
        ((slice(2, 2),), 0),
    ],
)
def test_reads_are_exact(source, bytes_read, index, elements):
    source.read("w", index)
    assert sum(bytes_read) == 4 * elements


def test_short_reads_are_continued(source, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda d, b, o: preadv(d, [b[0][:7]], o))
    np.testing.assert_array_equal(source.read("w"), VALUES)


def test_a_slice_with_a_step_is_refused(source):
    with pytest.raises(ValueError, match=facts("(slice(0, 6, 2),)", "(6, 4, 5)")):
        source.read("w", (slice(0, 6, 2),))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_written_and_read_back(tmp_path, name):
    dtype, data = DTYPES[name], bytes(range(8)) * 6
    values = np.frombuffer(data, dtype)
    if name == "BOOL":
        values = values.astype(np.uint8) % 2 == 1
    file = tmp_path / "model.safetensors"
    header = encode_header({"w": (values.shape, dtype), "empty": ((0, 3), dtype)})
    file.write_bytes(header + values.tobytes())
    source = bridge.open_checkpoint(tmp_path)
    assert len(header) % 64 == 0
    assert (source.dtype("w"), source.shape("empty")) == (dtype, (0, 3))
    assert source.read("w").tobytes() == values.tobytes()
    assert source.read("empty").shape == (0, 3)


def test_the_package_reads_what_we_write(tmp_path):
    values = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    header = encode_header({"ü": (values.shape, values.dtype)})
    (tmp_path / "a.safetensors").write_bytes(header + values.tobytes())
    read = reference.load_file(tmp_path / "a.safetensors")
    assert read["ü"].tobytes() == values.tobytes()


def write_sharded(directory: Path, weight_map: dict[str, str]) -> None:
    for name, key in (("a.safetensors", "a"), ("b.safetensors", "b")):
        reference.save_file({key: VALUES}, directory / name)
    index = {"weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_one_source(tmp_path):
    write_sharded(tmp_path, {"b": "b.safetensors", "a": "a.safetensors"})
    source = bridge.open_checkpoint(tmp_path)
    assert source.keys() == ("b", "a")
    np.testing.assert_array_equal(source.read("a"), VALUES)


def test_a_path_that_is_no_checkpoint_says_what_was_looked_for(tmp_path):
    with pytest.raises(
        ValueError, match=facts("'model.safetensors'", "'model.safetensors.index.json'")
    ):
        bridge.open_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match=facts("absent'")):
        bridge.open_checkpoint(tmp_path / "absent")


def test_a_file_cut_short_after_opening_is_noticed(tmp_path):
    file = tmp_path / "model.safetensors"
    reference.save_file({"w": VALUES}, file)
    source = bridge.open_checkpoint(file)
    os.truncate(file, file.stat().st_size - 8)
    with pytest.raises(ValueError, match=facts("model.safetensors'", "8")):
        source.read("w")
