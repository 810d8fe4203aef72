"""Scaled weights: codes of an integer or fp8 dtype, with a scale per block.

The common form of most quantizations: `(code - zero) * scale`, where a block of the
matrix shares zero and scale. Formats differ in how the three are stored.
"""

import dataclasses

import numpy as np

from bridge._box import Box, Range, as_index
from bridge.formats._safetensors import DTYPES
from bridge.formats._source import Source
from bridge.formats.quantized._codes import Codes

FP8_DTYPES = tuple(DTYPES[name] for name in ("F8_E4M3", "F8_E5M2"))
# All values of each fp8 dtype: a lookup is several times faster than a cast.
_FP8_VALUES = {
    dtype: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    for dtype in FP8_DTYPES
}
_CHUNK_ELEMENTS = 1 << 18  # decoded in float32 at a time


@dataclasses.dataclass(frozen=True)
class ScaledWeight:
    """Matrix `(code - zero) * scale`, computed in float32 and rounded once.

    Args:
      shape: Shape `(out, in)`.
      dtype: Dtype of the decoded weight.
      codes: Codes, as a matrix `(out, in)`, or `(in, out)` if `transposed`.
      scales: Scales, one per block of the codes' matrix.
      block: Rows and columns of the codes' matrix that share a scale.
      zeros: Zero points, one per block; None for none.
      zero_shift: Constant that is added to all zero points.
      zeros_scaled: Whether zero points are of the codes; otherwise they are of the
        weight, `code * scale + zero`.
      factor: Constant that the product is multiplied by; None for none.
      groups: Name of a tensor with the index, among the scales, of each input; None
        if blocks lie one after another.
      transposed: Whether codes are stored inputs first.
      beside: Names of stored tensors that only describe the weight.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    codes: Codes
    scales: Codes
    block: tuple[int, int]
    zeros: Codes | None = None
    zero_shift: int = 0
    zeros_scaled: bool = True
    factor: float | None = None
    groups: str | None = None
    transposed: bool = False
    beside: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        zeros = () if self.zeros is None else (self.zeros.name,)
        groups = () if self.groups is None else (self.groups,)
        return (self.codes.name, self.scales.name, *zeros, *groups, *self.beside)

    @property
    def scattered(self) -> bool:
        """Whether a box of rows is scattered over the stored tensors."""
        return self.transposed

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads a box and decodes it, a few rows at a time.

        Args:
          source: Source of the stored tensors.
          box: Requested region of the weight.

        Returns:
          Decoded region; if `transposed`, a view with the inputs outermost in memory.
        """
        box = box[::-1] if self.transposed else box
        decoded = np.empty([r.stop - r.start for r in box], self.dtype)
        if 0 not in decoded.shape:
            self._decode(source, box, decoded)
        return decoded.T if self.transposed else decoded

    def _decode(self, source: Source, box: Box, decoded: np.ndarray) -> None:
        codes = self.codes.read(source, box)
        blocks = self._blocks(source, box)
        grid = tuple(Range(int(b.min()), int(b.max()) + 1) for b in blocks)
        rows, columns = (b - r.start for b, r in zip(blocks, grid, strict=True))
        scales = self.scales.read(source, grid).astype(np.float32)
        zeros = None if self.zeros is None else _as_numbers(self.zeros, source, grid)
        step = max(1, _CHUNK_ELEMENTS // decoded.shape[1])
        for start in range(0, len(decoded), step):
            part = slice(start, start + step)
            scale = _take(scales, rows[part], columns)
            zero = None if zeros is None else _take(zeros, rows[part], columns)
            # Overflow to inf and NaN values are legal results: no warnings.
            with np.errstate(over="ignore", invalid="ignore"):
                decoded[part] = self._values(codes[part], scale, zero)

    def _values(
        self, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None
    ) -> np.ndarray:
        values = _as_float32(codes)
        if self.zeros_scaled:
            # Codes and zero points are small integers: the differences are exact.
            if self.zero_shift:
                values -= np.float32(self.zero_shift)
            if zeros is not None:
                values -= zeros
        values *= scales
        if zeros is not None and not self.zeros_scaled:
            values += zeros
        if self.factor is not None:
            values *= np.float32(self.factor)
        return values

    def _blocks(self, source: Source, box: Box) -> list[np.ndarray]:
        """Returns the index of the block of each row, and of each column."""
        blocks = [
            np.arange(*r) // size for r, size in zip(box, self.block, strict=True)
        ]
        if self.groups is not None:
            inputs = 0 if self.transposed else 1
            given = source.read(self.groups, as_index((box[inputs],)))
            # -1 says of an input that its group follows from its position.
            blocks[inputs] = np.where(given < 0, blocks[inputs], given)
            count = source.shape(self.scales.name)[inputs]
            if blocks[inputs].max() >= count:
                raise ValueError(
                    f"'{source.name}' has '{self.groups}' with a group "
                    f"{blocks[inputs].max()}, but {count} groups: it is damaged."
                )
        return blocks


def _take(grid: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Returns the number of each element's block, with dims of 1 where all share it."""
    taken = grid[rows]
    if taken.shape[1] == 1 or np.array_equal(columns, np.arange(taken.shape[1])):
        return taken
    return taken[:, columns]


def _as_numbers(codes: Codes, source: Source, box: Box) -> np.ndarray:
    return _as_float32(codes.read(source, box))


def _as_float32(codes: np.ndarray) -> np.ndarray:
    if codes.dtype in FP8_DTYPES:
        return np.take(_FP8_VALUES[codes.dtype], codes.view(np.uint8))
    return codes.astype(np.float32)
