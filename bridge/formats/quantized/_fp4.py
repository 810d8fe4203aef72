"""DeepSeek-V4's fp4 of experts: two E2M1 values per byte, one scale per 32 of a row.

Source: transformers `integrations/finegrained_fp8.py::Fp8Dequantize._unpack_fp4`, for
the order of the two values; names of the scales from
`quantizers/quantizer_finegrained_fp8.py::update_weight_conversions`.
"""

import dataclasses
from collections.abc import Collection

import ml_dtypes
import numpy as np

from bridge._box import Box, Range, as_index, shape_of
from bridge.formats._safetensors import DTYPES
from bridge.formats._source import Source
from bridge.formats.quantized._mxfp4 import decode_pairs

_PACKED, _E8M0 = DTYPES["I8"], DTYPES["F8_E8M0"]
_BLOCK_BYTES = 16
_BLOCK_SIZE = 2 * _BLOCK_BYTES  # values that share a scale


@dataclasses.dataclass(frozen=True)
class Fp4Tensor:
    """Matrix of packed E2M1 values with one power-of-two scale per 32 of a row.

    Args:
      weight: Name of the packed tensor, and of the decoded one.
      scale: Name of the scales, of shape `(out, in / 32)`.
      shape: Shape `(out, in)` of the decoded weight.
      dtype: Dtype of the decoded weight.
      scattered: Never: rows lie one after another.
    """

    weight: str
    scale: str
    shape: tuple[int, ...]
    dtype: np.dtype = np.dtype(ml_dtypes.bfloat16)
    scattered: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored tensors: weight and scales."""
        return self.weight, self.scale

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads and decodes a box.

        Args:
          source: Source of weight and scales.
          box: Requested region of the weight.

        Returns:
          Decoded region.
        """
        if 0 in shape_of(box):
            return np.empty(shape_of(box), self.dtype)
        rows, columns = box
        groups = Range(columns.start // _BLOCK_SIZE, -(-columns.stop // _BLOCK_SIZE))
        pairs = Range(groups.start * _BLOCK_BYTES, groups.stop * _BLOCK_BYTES)
        packed = source.read(self.weight, as_index((rows, pairs))).view(np.uint8)
        scales = source.read(self.scale, as_index((rows, groups))).view(np.uint8)
        blocks = packed.reshape(len(packed), -1, _BLOCK_BYTES)
        first = columns.start - groups.start * _BLOCK_SIZE
        width = columns.stop - columns.start
        decoded = decode_pairs(blocks, scales)[:, first : first + width]
        return decoded.astype(self.dtype, copy=False)


def find_fp4(
    source: Source, scales: dict[str, str], dtype: np.dtype
) -> tuple[dict[str, Fp4Tensor], dict[str, str]]:
    """Finds the packed fp4 weights of a checkpoint; reads headers only.

    Args:
      source: Checkpoint.
      scales: Name of the scales of each weight that has any.
      dtype: Dtype of the decoded weights.

    Returns:
      Weights by name, and error messages by tensor name.
    """
    tensors, wrong = {}, {}
    for key, scale in scales.items():
        if source.dtype(key) != _PACKED:
            continue
        shapes = source.shape(key), source.shape(scale)
        if misfit := _misfit(*shapes, source.dtype(scale)):
            wrong[scale] = misfit
        rows, *pairs = shapes[0] or (0,)
        tensors[key] = Fp4Tensor(key, scale, (rows, *(2 * n for n in pairs)), dtype)
    return tensors, wrong


def _misfit(
    packed: Collection[int], scales: tuple[int, ...], dtype: np.dtype
) -> str | None:
    """Returns an error message if the scales do not fit the weight, else None."""
    if len(packed) != 2:
        return f"{packed} is no matrix of packed values"
    rows, pairs = packed
    expected = rows, pairs // _BLOCK_BYTES
    if scales != expected or pairs % _BLOCK_BYTES:
        return f"{scales}, but {packed} bytes have {expected} blocks of {_BLOCK_SIZE}"
    if dtype != _E8M0:
        return f"scales of {dtype} are not decoded beside packed values"
    return None
