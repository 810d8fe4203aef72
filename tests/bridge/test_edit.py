"""Edits of checkpoints: what else of a directory follows them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.errors import facts

import bridge
from bridge.megatron import edit_distributed
from bridge.megatron.write._dcp import DcpWriter

F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def write_distributed(path: Path, **tensors: np.ndarray) -> Path:
    path.mkdir()
    with DcpWriter(path) as writer:
        for name, values in tensors.items():
            writer.add(name, (0,) * values.ndim, values)
        writer.finish()
    return path


def test_a_cast_of_megatron_makes_no_number_infinite(tmp_path):
    values = np.array([1.0, 1e8], np.float32)
    run = write_distributed(tmp_path / "run", a=values, b=values)
    edits = bridge.Edits(cast=(("b", F16),))
    with pytest.raises(ValueError, match=facts("'b'", "1e+08", "65504", "float16")):
        edit_distributed(run, tmp_path / "out", edits)
    assert not (tmp_path / "out").exists()
