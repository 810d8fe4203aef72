"""bitsandbytes: int8 with a scale per row, and nf4 or fp4 with a scale per block.

Int8 is `X.weight` with `X.SCB`, the largest magnitude of each row. Of 4 bits, two codes
share a byte of `X.weight`, the first in the high bits; a code is a row of the table
`X.quant_map`, and runs of `blocksize` values share a scale `X.absmax`, which may be
quantized itself (double quantization). `X.quant_state.bitsandbytes__nf4` is JSON with
the shape.

Source: bitsandbytes `functional.py::QuantState`, `backends/default/ops.py`.
"""

import dataclasses
import json
import math
from collections.abc import Container
from typing import Any

import numpy as np

from bridge._box import Box, Range, shape_of, span
from bridge.formats._json import parse_json
from bridge.formats._source import Source
from bridge.formats.quantized._codes import Column, Plain
from bridge.formats.quantized._scaled import ScaledWeight
from bridge.formats.quantized._weight import Found, Settings

_SCALES = ".SCB"
_FORMAT = ".weight_format"  # beside int8 weights; 0 is the order of rows
_STATE = ".quant_state.bitsandbytes__"
_TYPES = ("nf4", "fp4")
_CHUNK_BYTES = 1 << 18  # decoded in float32 at a time
_127TH = 7.874015718698502e-3  # as bitsandbytes writes it


@dataclasses.dataclass(frozen=True)
class FourBitWeight:
    """Weight of 4-bit codes in blocks of consecutive values.

    Args:
      name: Name of the codes' tensor; the others' names add to it.
      state: Name of the tensor with the shape and the block sizes.
      shape: Shape of the weight.
      dtype: Dtype of the decoded weight.
      block: Values that share a scale.
      nested_block: Scales that share a scale of their own; None if scales are stored
        in float32.
      nested_offset: Constant that is added to nested scales.
    """

    name: str
    state: str
    shape: tuple[int, ...]
    dtype: np.dtype
    block: int
    nested_block: int | None = None
    nested_offset: float = 0.0
    scattered: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return (self.name, self.state, *_names(self.name, self.nested_block))

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads the values that cover a box, decodes them, and cuts the box out.

        Args:
          source: Source of the stored tensors.
          box: Requested region of the weight.

        Returns:
          Decoded region.
        """
        if 0 in shape_of(box):
            return np.empty(shape_of(box), self.dtype)
        values = self._values(source, span(box, self.shape))
        # The first value is that of the box, so that the weight's strides select it.
        strides = [
            math.prod(self.shape[dim + 1 :]) * self.dtype.itemsize
            for dim in range(len(self.shape))
        ]
        return np.lib.stride_tricks.as_strided(values, shape_of(box), strides)

    def _values(self, source: Source, run: Range) -> np.ndarray:
        """Decodes a range of the weight's values, in order."""
        scale_run = Range(run.start // self.block, -(-run.stop // self.block))
        scales = self._scales(source, scale_run)
        table = source.read(f"{self.name}.quant_map").astype(np.float32)
        first = run.start // 2 * 2
        packed = self._bytes(source, Range(first // 2, -(-run.stop // 2)))
        decoded = np.empty(2 * len(packed), self.dtype)
        for start in range(0, len(packed), _CHUNK_BYTES):
            part = packed[start : start + _CHUNK_BYTES]
            codes = np.stack([part >> 4, part & 15], axis=-1).reshape(-1)
            places = np.arange(first + 2 * start, first + 2 * start + len(codes))
            # A last byte may hold one value more than there are.
            at = np.minimum(places // self.block, scale_run.stop - 1) - scale_run.start
            decoded[2 * start : 2 * start + len(codes)] = table[codes] * scales[at]
        return decoded[run.start - first : run.stop - first]

    def _bytes(self, source: Source, run: Range) -> np.ndarray:
        """Reads bytes of the codes, which may be stored as a wider dtype."""
        size = source.dtype(self.name).itemsize
        whole = slice(run.start // size, -(-run.stop // size))
        dims = len(source.shape(self.name)) - 1
        stored = source.read(self.name, (whole, *[slice(None)] * dims))
        stored = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        first = run.start - whole.start * size
        return stored[first : first + run.stop - run.start]

    def _scales(self, source: Source, run: Range) -> np.ndarray:
        """Returns the scales of a range of blocks, decoded if they are nested."""
        scales = source.read(f"{self.name}.absmax", (slice(*run),))
        if self.nested_block is None:
            return scales.astype(np.float32)
        table = source.read(f"{self.name}.nested_quant_map").astype(np.float32)
        nested = source.read(f"{self.name}.nested_absmax").astype(np.float32)
        blocks = np.arange(*run) // self.nested_block
        return table[scales] * nested[blocks] + np.float32(self.nested_offset)


def find_bitsandbytes(source: Source, settings: Settings, dtype: np.dtype) -> Found:
    """Finds the bitsandbytes weights of a checkpoint.

    Reads headers, and of each weight the few bytes that say its shape or its format.

    Args:
      source: Checkpoint.
      settings: `quantization_config`.
      dtype: Dtype of the decoded weights.

    Returns:
      Weights by name, and error messages by tensor name.
    """
    del settings
    keys = dict.fromkeys(source.keys())
    weights, wrong = {}, {}
    for key in keys:
        name = key.removesuffix(_SCALES) + ".weight"
        try:
            if key.endswith(_SCALES):
                weights[name] = _int8(source, keys, name, key, dtype)
            elif _STATE in key:
                name = key.partition(_STATE)[0]
                weights[name] = _four_bit(source, keys, name, key, dtype)
        except (ValueError, KeyError, TypeError) as error:
            wrong[key] = str(error)
    return Found(weights, wrong)


def _int8(
    source: Source, keys: Container[str], name: str, scales: str, dtype: np.dtype
) -> ScaledWeight:
    if name not in keys or source.dtype(name) != np.int8:
        raise ValueError(f"there is no int8 weight {name}")
    shape = source.shape(name)
    if len(shape) != 2 or source.shape(scales) != shape[:1]:
        raise ValueError(f"{source.shape(scales)} scales of a weight {shape}")
    order = name.removesuffix(".weight") + _FORMAT
    if order in keys and np.any(stored := source.read(order)):
        raise ValueError(f"{order} is {stored}: only 0, the order of rows, is decoded")
    return ScaledWeight(
        shape=shape,
        dtype=dtype,
        codes=Plain(name),
        scales=Column(scales),
        block=(1, shape[1]),
        factor=_127TH,
        beside=(order,) if order in keys else (),
    )


def _four_bit(
    source: Source, keys: Container[str], name: str, key: str, dtype: np.dtype
) -> FourBitWeight:
    state = parse_json(source.read(key).tobytes(), f"'{key}'")
    if state.get("quant_type") not in _TYPES:
        raise ValueError(f"quant_type {state.get('quant_type')!r} is none of {_TYPES}")
    nested = "nested_blocksize" in state
    weight = FourBitWeight(
        name=name,
        state=key,
        shape=tuple(_sizes(state["shape"])),
        dtype=dtype,
        block=_sizes([state["blocksize"]])[0],
        nested_block=_sizes([state["nested_blocksize"]])[0] if nested else None,
        nested_offset=float(state["nested_offset"]) if nested else 0.0,
    )
    if missing := [part for part in weight.parts if part not in keys]:
        raise ValueError(f"there is no {', '.join(missing)}")
    _check_parts(source, weight)
    return weight


def _check_parts(source: Source, weight: FourBitWeight) -> None:
    values = math.prod(weight.shape)
    stored = math.prod(source.shape(weight.name)) * source.dtype(weight.name).itemsize
    blocks = -(-values // weight.block)
    expected: dict[str, Any] = {
        "absmax": (blocks,),
        "quant_map": (16,),
        "nested_quant_map": (256,),
        "nested_absmax": (-(-blocks // (weight.nested_block or 1)),),
    }
    if not 0 <= stored - -(-values // 2) < source.dtype(weight.name).itemsize:
        raise ValueError(f"{stored} bytes of codes for a weight {weight.shape}")
    for part in _names(weight.name, weight.nested_block):
        shape = expected[part.removeprefix(f"{weight.name}.")]
        if source.shape(part) != shape:
            raise ValueError(f"{part} is {source.shape(part)}, not {shape}")
    dtype = source.dtype(f"{weight.name}.absmax")
    if dtype != (np.float32 if weight.nested_block is None else np.uint8):
        raise ValueError(f"absmax of {dtype} is not decoded")


def _names(name: str, nested_block: int | None) -> list[str]:
    nested = ("nested_absmax", "nested_quant_map")
    parts = ("absmax", "quant_map", *(() if nested_block is None else nested))
    return [f"{name}.{part}" for part in parts]


def _sizes(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(v) is not int or v < 1 for v in values):
        raise ValueError(f"{json.dumps(values)} are not positive sizes")
    return values
