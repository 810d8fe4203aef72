"""NVFP4 of Model Optimizer: two E2M1 values per byte, an E4M3 scale per 16 inputs.

The scales of a weight are themselves scaled by one float32 number. The lower half of a
byte is the first of its two values.

Source: Model Optimizer `modelopt/torch/quantization/qtensor/nvfp4_tensor.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from bridge._box import Box
from bridge.formats._safetensors import DTYPES
from bridge.formats._source import Source
from bridge.formats.quantized._codes import Packed, Plain
from bridge.formats.quantized._scaled import ScaledWeight
from bridge.formats.quantized._weight import Found

_GROUP = 16  # inputs that share a scale
_FACTOR = ".weight_scale_2"
_ALGORITHMS = ("FP8", "MXFP8", "NVFP4", "W4A16_NVFP4")
_MIXED = "MIXED_PRECISION"


@dataclasses.dataclass(frozen=True)
class _Float4:
    """Matrix of E2M1 values, packed along its rows.

    Args:
      name: Name of the stored tensor, of bytes.
    """

    name: str

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads the region of a box, as float32."""
        return np.take(_values(), Packed(self.name, 4, dim=1).read(source, box))


@dataclasses.dataclass(frozen=True)
class _ScaledScales:
    """Matrix of scales that are fp8, times a number in a tensor of its own.

    Args:
      name: Name of the stored scales.
      factor: Name of the tensor with the number.
    """

    name: str
    factor: str

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads the region of a box, as float32."""
        scales = Plain(self.name).read(source, box).astype(np.float32)
        return scales * source.read(self.factor).astype(np.float32).reshape(1, 1)


def find_nvfp4(source: Source, dtype: np.dtype) -> Found:
    """Finds NVFP4 weights; reads headers only.

    Args:
      source: Checkpoint.
      dtype: Dtype of the decoded weights.

    Returns:
      Weights `X.weight`, and error messages by tensor name.
    """
    keys = dict.fromkeys(source.keys())
    weights, wrong = {}, {}
    for factor in (key for key in keys if key.endswith(_FACTOR)):
        name = factor.removesuffix(_FACTOR)
        codes, scales = f"{name}.weight", f"{name}.weight_scale"
        if misfit := _misfit(source, keys, codes, scales, factor):
            wrong[factor] = misfit
            continue
        rows, bytes_ = source.shape(codes)
        weights[codes] = ScaledWeight(
            shape=(rows, 2 * bytes_),
            dtype=dtype,
            codes=_Float4(codes),
            scales=_ScaledScales(scales, factor),
            block=(1, _GROUP),
            beside=(factor,),
        )
    return Found(weights, wrong)


def unmodelled_algorithms(settings: Mapping[str, Any]) -> list[str]:
    """Returns a line for each algorithm of Model Optimizer that is not decoded.

    Args:
      settings: `quantization_config`; where layers differ, each is said.
    """
    said = [settings.get("quant_algo")]
    if said == [_MIXED]:
        layers = settings.get("quantized_layers") or {}
        found = [layer.get("quant_algo") for layer in layers.values()]
        said = list(dict.fromkeys(found)) or [_MIXED]
    return [
        f"quant_algo {name!r} of modelopt: only {', '.join(_ALGORITHMS)}"
        for name in said
        if name not in _ALGORITHMS
    ]


def _misfit(
    source: Source, keys: Collection[str], codes: str, scales: str, factor: str
) -> str | None:
    """Returns an error message if the three tensors do not fit, else None."""
    if missing := [key for key in (codes, scales) if key not in keys]:
        return f"there is no {' and no '.join(missing)}"
    shape, grid = source.shape(codes), source.shape(scales)
    dtypes = [source.dtype(key) for key in (codes, scales, factor)]
    if dtypes != [np.uint8, DTYPES["F8_E4M3"], np.float32]:
        found = ", ".join(map(str, dtypes))
        return f"{found}: codes are uint8, scales float8_e4m3fn, their scale float32"
    if len(shape) != 2 or math.prod(source.shape(factor)) != 1:
        return f"{shape} codes with {source.shape(factor)} scales of scales"
    if grid != (shape[0], -(-2 * shape[1] // _GROUP)):
        return (
            f"{grid} scales of a weight {(shape[0], 2 * shape[1])}: one each {_GROUP}"
        )
    return None


@functools.cache
def _values() -> np.ndarray:
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    return codes.astype(np.float32)
