"""Tiny random Llamas without torch, each written once a session."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from bridge_helpers import write_llama


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
