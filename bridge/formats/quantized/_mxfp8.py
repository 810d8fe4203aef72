"""MXFP8 of Model Optimizer: fp8 values, a power of two per 32 inputs.

The power is stored as a byte, with a bias of 127.

Source: OCP Microscaling Formats (MX) v1.0; Model Optimizer
`modelopt/torch/quantization/qtensor/mxfp8_tensor.py`.
"""

import dataclasses
from collections.abc import Collection

import ml_dtypes
import numpy as np

from bridge._box import Box
from bridge.formats._safetensors import DTYPES
from bridge.formats._source import Source
from bridge.formats.quantized._codes import Plain
from bridge.formats.quantized._scaled import ScaledWeight
from bridge.formats.quantized._weight import Found

_BLOCK = 32  # inputs that share a scale
_SCALE = ".weight_scale"
_POWER = np.dtype(ml_dtypes.float8_e8m0fnu)
_BYTES = (np.dtype(np.uint8), _POWER)


@dataclasses.dataclass(frozen=True)
class _Powers:
    """Matrix of powers of two, a byte each.

    Args:
      name: Name of the stored tensor.
    """

    name: str

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads the region of a box, as float32."""
        stored = Plain(self.name).read(source, box)
        return np.ascontiguousarray(stored).view(_POWER).astype(np.float32)


def find_mxfp8(source: Source, dtype: np.dtype, others: Collection[str] = ()) -> Found:
    """Finds MXFP8 weights; reads headers only.

    Args:
      source: Checkpoint.
      dtype: Dtype of the decoded weights.
      others: Names of scales of weights of another format.

    Returns:
      Weights `X.weight`, and error messages by tensor name.
    """
    keys = dict.fromkeys(source.keys())
    weights, wrong = {}, {}
    for scales in (key for key in keys if key.endswith(_SCALE)):
        if scales in others or source.dtype(scales) not in _BYTES:
            continue
        codes = scales.removesuffix("_scale")
        if misfit := _misfit(source, keys, codes, scales):
            wrong[scales] = misfit
            continue
        weights[codes] = ScaledWeight(
            shape=source.shape(codes),
            dtype=dtype,
            codes=Plain(codes),
            scales=_Powers(scales),
            block=(1, _BLOCK),
        )
    return Found(weights, wrong)


def _misfit(
    source: Source, keys: Collection[str], codes: str, scales: str
) -> str | None:
    """Returns an error message if the two tensors do not fit, else None."""
    if codes not in keys or source.dtype(codes) != DTYPES["F8_E4M3"]:
        return f"there is no float8_e4m3fn weight {codes}"
    shape, grid = source.shape(codes), source.shape(scales)
    if len(shape) != 2 or grid != (shape[0], -(-shape[1] // _BLOCK)):
        return f"{grid} scales of a weight {shape}: one each {_BLOCK} inputs"
    return None
