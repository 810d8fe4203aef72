"""torchao: tensor subclasses, taken apart in safetensors files.

The attributes of a weight `X.weight` are tensors `X._weight_qdata`, `X._weight_scale`
and `X._weight_zero_point`; its class and the rest are JSON in the file's metadata.

Source: torchao `prototype/safetensors/safetensors_support.py`,
`quantization/quantize_/workflows/`: `Float8Tensor`, `Int8Tensor`, `Int4Tensor`,
`IntxUnpackedToInt8Tensor`; FBGEMM `gen_ai/quantize.py` for the codes of `Int4Tensor`.
"""

from collections.abc import Container
from typing import Any

import numpy as np

from bridge.formats._json import parse_json
from bridge.formats._source import SafetensorsSource, Source
from bridge.formats.quantized._codes import Codes, Packed, Plain, Transposed
from bridge.formats.quantized._scaled import FP8_DTYPES, ScaledWeight
from bridge.formats.quantized._weight import Found, Settings

CLASSES = ("Float8Tensor", "Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
"""Classes of tensors that are decoded."""


def find_torchao(source: Source, settings: Settings, dtype: np.dtype) -> Found:
    """Finds the torchao weights of a checkpoint; reads headers only.

    Args:
      source: Checkpoint of safetensors files.
      settings: `quantization_config`.
      dtype: Dtype of the decoded weights.

    Returns:
      Weights by name, and error messages by tensor name.
    """
    del settings
    keys = set(source.keys())
    metadata = source.metadata() if isinstance(source, SafetensorsSource) else {}
    weights, wrong = {}, {}
    for name, text in metadata.items():
        if not text.startswith("{"):
            continue
        try:
            said = parse_json(text.encode(), f"the metadata of '{name}'")
            if said.get("_type") not in (None, "Tensor"):
                weights[name] = _weight(source, keys, name, said, dtype)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            wrong[name] = str(error)
    return Found(weights, wrong)


def _weight(
    source: Source,
    keys: Container[str],
    name: str,
    said: dict[str, Any],
    dtype: np.dtype,
) -> ScaledWeight:
    kind, module = said["_type"], name.rpartition(".")
    if kind not in CLASSES:
        raise ValueError(f"{kind} is not decoded, {', '.join(CLASSES)} are")
    parts = {
        part: f"{module[0]}._{module[2]}_{part}" for part in said["_tensor_data_names"]
    }
    if extra := set(parts) - {"qdata", "scale", "zero_point"}:
        raise ValueError(f"{', '.join(sorted(extra))} of {kind} is not decoded")
    if missing := [part for part in parts.values() if part not in keys]:
        raise ValueError(f"there is no {', '.join(missing)}")
    zeros = parts.get("zero_point")
    shape = source.shape(parts["qdata"])
    if len(shape) != 2:
        raise ValueError(f"{kind} of shape {shape} is not a matrix")
    codes: Codes = Plain(parts["qdata"])
    if kind == "Int4Tensor":
        shape = shape[0], 2 * shape[1]
        codes = Packed(parts["qdata"], bits=4, dim=1, signed=True)
    _check_codes(source, kind, parts["qdata"])
    # Int4Tensor stores the scales of a group of inputs side by side.
    transposed = kind == "Int4Tensor"
    stored = Transposed if transposed else Plain
    return ScaledWeight(
        shape=shape,
        dtype=dtype,
        codes=codes,
        scales=stored(parts["scale"]),
        block=_block(source, parts, shape, transposed),
        zeros=None if zeros is None else stored(zeros),
        zeros_scaled=not transposed,
    )


def _check_codes(source: Source, kind: str, name: str) -> None:
    allowed = {
        "Float8Tensor": FP8_DTYPES,
        "Int4Tensor": (np.dtype(np.int8), np.dtype(np.uint8)),
    }.get(kind, (np.dtype(np.int8),))
    if source.dtype(name) not in allowed:
        raise ValueError(f"codes of {source.dtype(name)} are not those of {kind}")


def _block(
    source: Source, parts: dict[str, str], shape: tuple[int, ...], transposed: bool
) -> tuple[int, int]:
    """Returns the block that the number of scales says."""
    grid = source.shape(parts["scale"])
    for part in ("scale", "zero_point"):
        if part in parts and source.shape(parts[part]) != grid:
            raise ValueError(f"{part} is {source.shape(parts[part])}, scale is {grid}")
    if len(grid) != 2:
        raise ValueError(f"scale of shape {grid} is not a matrix of blocks")
    blocks = grid[::-1] if transposed else grid
    if 0 in blocks or any(n % b for n, b in zip(shape, blocks, strict=True)):
        raise ValueError(f"{grid} scales of a weight {shape} are not of equal blocks")
    return shape[0] // blocks[0], shape[1] // blocks[1]
