"""Tiny random Llamas without torch, to be loaded, watched or broken; and goldens."""

import functools
import os
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from bridge_helpers import write_llama
from helpers.errors import facts
from refusals import CANARY, MAX_ALLOCATED_BYTES, listing

import bridge

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


@pytest.fixture
def checkpoint(tmp_path, monkeypatch) -> Path:
    """A directory that loads, to be broken, and somewhere for stray files to show."""
    monkeypatch.chdir(tmp_path)
    return write_llama(tmp_path / "checkpoint")


@pytest.fixture
def refused(tmp_path, capfd) -> Callable[..., str]:
    """Asserts that a path is refused with these facts, and nothing else happens."""

    def refused(path: Path, *wanted: str) -> str:
        before = listing(tmp_path)
        capfd.readouterr()
        tracemalloc.start()
        with pytest.raises(ValueError, match=facts(*wanted)) as raised:
            bridge.load_hf(path, {})
        allocated = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert str(path) in str(raised.value)
        assert len(str(raised.value)) < 2000
        assert listing(tmp_path) == before and CANARY not in before
        assert capfd.readouterr() == ("", "")
        assert allocated < MAX_ALLOCATED_BYTES
        return str(raised.value)

    return refused
