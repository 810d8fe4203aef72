"""Tiny random Llamas without torch, and goldens, each made once a session."""

import functools
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from bridge_helpers import write_llama

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), np.float32)


@pytest.fixture(scope="session")
def llama_bf16(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama_bf16"), ml_dtypes.bfloat16)


@pytest.fixture
def bytes_read(monkeypatch) -> list[int]:
    """Bytes of each read from a checkpoint, as they happen."""
    counts, preadv = [], os.preadv

    def counting(descriptor, buffers, offset):
        counts.append(preadv(descriptor, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    return counts


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Callable[[str], Path]:
    """Checkpoints that Megatron wrote, unpacked when they are first asked for."""

    @functools.cache
    def unpack(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
            archive.extractall(directory, filter="data")
        return directory / name

    return unpack
