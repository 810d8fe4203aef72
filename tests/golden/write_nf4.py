"""Writes what bitsandbytes makes of a small weight in its 4-bit normal float.

PYTHONPATH=. python tests/golden/write_nf4.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "nf4.json"


def weight() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(8, 64)).astype(np.float32)


def write() -> None:
    import bitsandbytes
    import torch
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        torch.from_numpy(weight()), blocksize=64, quant_type="nf4"
    )
    decoded = functional.dequantize_4bit(codes, state)
    told = {
        "bitsandbytes": bitsandbytes.__version__,
        "codes": codes.numpy().tobytes().hex(),
        "scales": state.absmax.numpy().tobytes().hex(),
        "decoded": decoded.numpy().tobytes().hex(),
    }
    FILE.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    write()
