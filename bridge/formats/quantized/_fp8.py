"""DeepSeek's fp8: E4M3 weights with one scale per block of 128 by 128.

The scales of `X.weight` are `X.weight_scale_inv`, or `X.scale` in files of V4.

Source: deepseek-ai/DeepSeek-V3 `inference/kernel.py::weight_dequant`. The block index
is position divided by block size, so the last block of a dim may be short;
transformers 5.23 (`finegrained_fp8.py::Fp8Dequantize`) divides the size by the number
of scales instead: it rejects 576 rows with 5 scales, and assigns each of 2 scales 96
of 192 rows.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from bridge._box import Box, Range, as_index, shape_of
from bridge.formats._safetensors import DTYPES
from bridge.formats._source import Source
from bridge.formats.quantized._fp4 import find_fp4
from bridge.formats.quantized._weight import Found, Settings

_E4M3 = DTYPES["F8_E4M3"]
_SCALE_DTYPES = tuple(DTYPES[name] for name in ("F32", "BF16", "F8_E8M0"))
_SUFFIX = "_scale_inv"
# V4's names: `X.scale` beside `X.weight`.
_WEIGHT, _SCALE = ".weight", ".scale"
# All E4M3 values in float32: a lookup by `take` is several times faster than a cast.
_VALUES = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Fp8Tensor:
    """E4M3 weight with one scale per block of its last two dims.

    Args:
      weight: Name of the E4M3 tensor.
      scale: Name of the scales.
      shape: Shape `(..., out, in)`.
      block: Block size `(rows, columns)`.
      dtype: Dtype of the decoded weight.
      scattered: Never: rows lie one after another.
    """

    weight: str
    scale: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    dtype: np.dtype = np.dtype(ml_dtypes.bfloat16)
    scattered: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored tensors: weight and scales."""
        return self.weight, self.scale

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads and decodes a box.

        The product is computed in float32 and rounded once, one row of blocks at a
        time: a float32 copy of the full matrix would be four times the bytes read.

        Args:
          source: Source of weight and scales.
          box: Requested region of the weight.

        Returns:
          Decoded region.
        """
        decoded = np.empty(shape_of(box), self.dtype)
        if 0 in decoded.shape:
            return decoded
        numbers = source.read(self.weight, as_index(box)).view(np.uint8)
        scale_box = (
            *box[:-2],
            _blocks_of(box[-2], self.block[0]),
            _blocks_of(box[-1], self.block[1]),
        )
        scales = source.read(self.scale, as_index(scale_box))
        # Index, within `scales`, of each column's scale.
        columns = np.arange(*box[-1]) // self.block[1] - scale_box[-1].start
        for *matrix, block_row in np.ndindex(scales.shape[:-1]):
            rows = _rows_of(scale_box[-2].start + block_row, self.block[0], box[-2])
            part = (*matrix, rows)
            scale = scales[(*matrix, block_row)].astype(np.float32)[columns]
            # Overflow to inf and NaN values are legal results: no warnings.
            with np.errstate(over="ignore", invalid="ignore"):
                decoded[part] = np.take(_VALUES, numbers[part]) * scale
        return decoded


def find_fp8(source: Source, settings: Settings, dtype: np.dtype) -> Found:
    """Finds the fp8 weights of a checkpoint, and fp4 ones; reads headers only.

    Args:
      source: Checkpoint; a weight and its scales may be in different files.
      settings: `quantization_config`; its `weight_block_size` is rows and columns.
      dtype: Dtype of the decoded weights.

    Returns:
      Weights by name, and error messages by tensor name.

    Raises:
      ValueError: If the block size is not two positive integers.
    """
    block = _check_block(settings.get("weight_block_size"))
    keys = dict.fromkeys(source.keys())
    beside = {
        key: scale
        for key in keys
        if key.endswith(_WEIGHT)
        and (scale := key.removesuffix(_WEIGHT) + _SCALE) in keys
    }
    tensors = {
        key: Fp8Tensor(
            key, beside.get(key, key + _SUFFIX), source.shape(key), block, dtype
        )
        for key in keys
        if source.dtype(key) == _E4M3
    }
    wrong = {
        key: f"there is no fp8 weight {key.removesuffix(_SUFFIX)}"
        for key in keys
        if key.endswith(_SUFFIX) and key.removesuffix(_SUFFIX) not in tensors
    }
    for key, tensor in tensors.items():
        scale = tensor.scale
        if scale not in keys:
            wrong[key] = f"there is no {scale}"
        elif misfit := _misfit(tensor, source.shape(scale), source.dtype(scale)):
            wrong[scale] = misfit
    packed, misfits = find_fp4(source, beside, dtype)
    return Found(tensors | packed, wrong | misfits)


def _misfit(tensor: Fp8Tensor, shape: tuple[int, ...], dtype: np.dtype) -> str | None:
    """Returns an error message if the scales do not fit the weight, else None."""
    if len(tensor.shape) < 2:
        return f"{tensor.shape} has no rows and columns to be cut into blocks"
    sizes = zip(tensor.shape[-2:], tensor.block, strict=True)
    expected = *tensor.shape[:-2], *(-(-size // block) for size, block in sizes)
    if shape != expected:
        return f"{shape}, but {tensor.shape} has {expected} blocks of {tensor.block}"
    if dtype not in _SCALE_DTYPES:
        return f"scales of {dtype} are not decoded"
    return None


def _check_block(block: Any) -> tuple[int, int]:
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or any(type(size) is not int or size < 1 for size in block)
    ):
        raise ValueError(
            f"weight_block_size = {block!r} of quantization_config is not the rows and "
            "columns of a block."
        )
    return block[0], block[1]


def _blocks_of(positions: Range, block: int) -> Range:
    return Range(positions.start // block, -(-positions.stop // block))


def _rows_of(block_row: int, block: int, rows: Range) -> slice:
    """Returns the part of `rows` in a block row, relative to the start of `rows`."""
    start = max(block_row * block, rows.start) - rows.start
    return slice(start, min((block_row + 1) * block, rows.stop) - rows.start)
