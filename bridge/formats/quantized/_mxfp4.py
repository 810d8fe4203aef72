"""GPT-OSS's mxfp4: two E2M1 values per byte, one power-of-two scale per 32 values.

Source: OCP Microscaling Formats (MX) v1.0; names, shapes and the order of the two
values from transformers `integrations/mxfp4.py::_convert_moe_packed_tensors`.
"""

import dataclasses
import functools

import ml_dtypes
import numpy as np

from bridge._box import Box, Range, as_index, shape_of
from bridge.formats._source import Source
from bridge.formats.quantized._weight import Found, Settings

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16
_BLOCK_SIZE = 2 * _BLOCK_BYTES  # values that share a scale


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor:
    """Mxfp4 weights of all experts of a layer.

    Args:
      name: Name of the decoded tensor; the stored names add `_blocks` and `_scales`.
      shape: Shape `(experts, in, out)`, as in a bfloat16 checkpoint. Blocks run along
        `in`, and are stored as `(experts, out, in / 32, 16)`.
      dtype: Dtype of the decoded weight.
      scattered: Never: experts lie one after another.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype = np.dtype(ml_dtypes.bfloat16)
    scattered: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored tensors: blocks and scales."""
        return self.name + _BLOCKS, self.name + _SCALES

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads and decodes a box, one expert at a time.

        Args:
          source: Source of blocks and scales.
          box: Requested region of the weights.

        Returns:
          Decoded region `(experts, in, out)`: a transposed view of memory
          with `in` innermost.
        """
        experts, inputs, outputs = box
        num_experts, num_in, num_out = shape_of(box)
        decoded = np.empty((num_experts, num_out, num_in), self.dtype)
        if 0 not in decoded.shape:
            groups = Range(inputs.start // _BLOCK_SIZE, -(-inputs.stop // _BLOCK_SIZE))
            first = inputs.start - groups.start * _BLOCK_SIZE
            for i in range(num_experts):
                expert = Range(experts.start + i, experts.start + i + 1)
                part = as_index((expert, outputs, groups))
                blocks, scales = (source.read(name, part) for name in self.parts)
                values = decode_pairs(blocks[0], scales[0])
                decoded[i] = values[:, first : first + num_in]
        return decoded.transpose(0, 2, 1)


def find_mxfp4(source: Source, settings: Settings, dtype: np.dtype) -> Found:
    """Finds the mxfp4 weights of a checkpoint; reads headers only.

    Args:
      source: Checkpoint; blocks and scales may be in different files.
      settings: `quantization_config`.
      dtype: Dtype of the decoded weights.

    Returns:
      Weights by decoded name, and error messages by tensor name.
    """
    del settings
    keys = dict.fromkeys(source.keys())
    names = [
        key.removesuffix(suffix)
        for suffix in (_BLOCKS, _SCALES)
        for key in keys
        if key.endswith(suffix)
    ]
    tensors, wrong = {}, {}
    for name in dict.fromkeys(names):
        parts = [key for key in (name + _BLOCKS, name + _SCALES) if key in keys]
        if misfit := _misfit([(source.shape(k), source.dtype(k)) for k in parts]):
            wrong |= dict.fromkeys(parts, misfit)
        else:
            num_experts, num_out, num_blocks, _ = source.shape(name + _BLOCKS)
            shape = num_experts, num_blocks * _BLOCK_SIZE, num_out
            tensors[name] = Mxfp4Tensor(name, shape, dtype)
    return Found(tensors, wrong)


def _misfit(parts: list[tuple[tuple[int, ...], np.dtype]]) -> str | None:
    """Returns an error message if blocks and scales do not fit, else None."""
    if len(parts) != 2:
        return f"there are not both {_BLOCKS} and {_SCALES} of this name"
    (blocks, blocks_dtype), (scales, scales_dtype) = parts
    if len(blocks) != 4 or blocks[-1] != _BLOCK_BYTES:
        return f"{blocks} is not (experts, out, blocks, {_BLOCK_BYTES})"
    if scales != blocks[:-1]:
        return f"{blocks} blocks with {scales} scales"
    if {blocks_dtype, scales_dtype} != {np.dtype(np.uint8)}:
        return f"{blocks_dtype} blocks with {scales_dtype} scales are not uint8"
    return None


def decode_pairs(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decodes blocks of 16 bytes, each with a scale, to bfloat16.

    Args:
      blocks: Bytes `(out, blocks, 16)`, each of two values, the lower bits first.
      scales: Exponents `(out, blocks)` as bytes.

    Returns:
      Values `(out, in)`.
    """
    # One lookup of 4 bytes decodes the two values of a byte and applies their scale.
    pairs = np.take(_pairs(), scales[..., None].astype(np.uint16) << 8 | blocks)
    return pairs.view(ml_dtypes.bfloat16).reshape(len(blocks), -1)


@functools.cache
def _pairs() -> np.ndarray:
    """Returns a table of decoded value pairs: uint32 at `256 * scale + byte`.

    An entry is two bfloat16 values: those of the byte, times the scale. All are exact,
    except that E2M1 times 2**127 may overflow to infinity. Scale 255 is E8M0's NaN.
    """
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    low_first = np.arange(256)[:, None] >> [0, 4] & 15
    numbers = nibbles.astype(np.float32)[low_first]
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    with np.errstate(over="ignore"):
        values = scales.astype(np.float32)[:, None, None] * numbers
    return (
        np.ascontiguousarray(values.astype(ml_dtypes.bfloat16))
        .view(np.uint32)[..., 0]
        .reshape(-1)
    )
