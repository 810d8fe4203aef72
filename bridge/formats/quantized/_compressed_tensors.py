"""compressed-tensors: int8 and fp8 as they are, and packed integers.

`X.weight` of int8 or fp8 with `X.weight_scale`, or `X.weight_packed`, codes in int32
along the inputs, with `X.weight_shape`. Scales are one for the tensor, for each row,
for each group of inputs of a row, or for each block of rows and inputs. Packed codes
and zero points are stored with half their range added.

Source: compressed-tensors `compressors/pack_quantized/helpers.py`,
`quantization/lifecycle/forward.py::dequantize`.
"""

import functools
import math
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np

from bridge.formats._source import Source
from bridge.formats.quantized._codes import Codes, Packed, Plain, Scalar
from bridge.formats.quantized._scaled import FP8_DTYPES, ScaledWeight
from bridge.formats.quantized._weight import Found, Settings

FORMATS = (
    *("int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
    *("mixed-precision", "dense"),
)
"""Formats that are decoded; of mixed precision, each group has its own."""

_PACKED, _SCALE = ".weight_packed", ".weight_scale"
# Of other bits, versions of compressed-tensors pack codes differently.
_BITS = (2, 4, 8)
_ACTIVATIONS = ("input", "output", "k", "v", "q")
_UNUSED = tuple(
    f".{of}_{what}"
    for of in _ACTIVATIONS
    for what in ("scale", "zero_point", "global_scale")
)


def undecoded(settings: Settings) -> list[str]:
    """Returns what settings of compressed-tensors say that is not decoded."""
    wrong = [
        f"format {name!r}: only {', '.join(FORMATS)} are decoded"
        for name in dict.fromkeys(_formats(settings))
        if name not in FORMATS
    ]
    sparsity = settings.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        wrong.append(f"sparsity_config format {sparsity['format']!r} is not decoded")
    if (settings.get("transform_config") or {}).get("config_groups"):
        wrong.append("transform_config: transformed weights are not decoded")
    return wrong


def find_compressed_tensors(
    source: Source, settings: Settings, dtype: np.dtype
) -> Found:
    """Finds the weights of a checkpoint of compressed-tensors.

    Reads headers, and the shape that is stored beside each packed weight.

    Args:
      source: Checkpoint.
      settings: `quantization_config`; block sizes are taken from it.
      dtype: Dtype of the decoded weights.

    Returns:
      Weights `X.weight`, and error messages by tensor name.
    """
    keys = dict.fromkeys(source.keys())
    weights, wrong = {}, {}
    modules = (k.rpartition(".")[0] for k in keys if k.endswith((_PACKED, _SCALE)))
    for name in dict.fromkeys(modules):
        read = _packed if f"{name}{_PACKED}" in keys else _plain
        try:
            weights[f"{name}.weight"] = read(source, keys, name, settings, dtype)
        except ValueError as error:
            wrong[f"{name}.weight"] = str(error)
    unused = (key for key in keys if key.endswith(_UNUSED))
    return Found(weights, wrong, tuple(unused))


def _packed(
    source: Source, keys: Container[str], name: str, settings: Settings, dtype: np.dtype
) -> ScaledWeight:
    missing = [
        f"{name}.{part}"
        for part in ("weight_shape", "weight_scale")
        if f"{name}.{part}" not in keys
    ]
    if missing:
        raise ValueError(f"there is no {', '.join(missing)}")
    codes = name + _PACKED
    if source.dtype(codes) != np.int32:
        raise ValueError(f"codes of {source.dtype(codes)} are not decoded")
    shape = tuple(int(size) for size in source.read(f"{name}.weight_shape"))
    bits = _bits(source.shape(codes), shape, settings)
    weight = _weight(source, keys, name, shape, settings, dtype)
    zeros = None
    if f"{name}.weight_zero_point" in keys:
        zeros = Packed(f"{name}.weight_zero_point", bits, dim=0)
        groups = source.shape(name + _SCALE)[-1]
        expected = -(-shape[0] * bits // 32), groups
        if source.shape(zeros.name) != expected:
            raise ValueError(f"{source.shape(zeros.name)} zeros, not {expected}")
    return weight(
        codes=Packed(codes, bits, dim=1),
        zeros=zeros,
        zero_shift=0 if zeros else 1 << (bits - 1),
        beside=(f"{name}.weight_shape",),
    )


def _plain(
    source: Source, keys: Container[str], name: str, settings: Settings, dtype: np.dtype
) -> ScaledWeight:
    codes = f"{name}.weight"
    if codes not in keys:
        raise ValueError(f"there is no {codes}")
    if source.dtype(codes) not in (np.int8, *FP8_DTYPES):
        raise ValueError(f"weight of {source.dtype(codes)} is not decoded")
    weight = _weight(source, keys, name, source.shape(codes), settings, dtype)
    zeros = None
    if f"{name}.weight_zero_point" in keys:
        zeros = _grid(source, f"{name}.weight_zero_point")
        if source.shape(zeros.name) != source.shape(name + _SCALE):
            raise ValueError(f"{source.shape(zeros.name)} zeros of other blocks")
    return weight(codes=Plain(codes), zeros=zeros)


def _weight(
    source: Source,
    keys: Container[str],
    name: str,
    shape: tuple[int, ...],
    settings: Settings,
    dtype: np.dtype,
) -> Callable[..., ScaledWeight]:
    """Returns the weight's constructor, which wants codes and zero points yet."""
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"weight of shape {shape} is not a matrix")
    scales = name + _SCALE
    if source.dtype(scales).name not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"scales of {source.dtype(scales)} are not decoded")
    groups = f"{name}.weight_g_idx" if f"{name}.weight_g_idx" in keys else None
    if groups is not None and source.shape(groups) != shape[1:]:
        raise ValueError(f"{source.shape(groups)} groups of {shape[1]} inputs")
    block = _block(source.shape(scales), (shape[0], shape[1]), settings)

    return functools.partial(
        ScaledWeight,
        shape=shape,
        dtype=dtype,
        scales=_grid(source, scales),
        block=block,
        groups=groups,
    )


def _bits(stored: tuple[int, ...], shape: tuple[int, ...], settings: Settings) -> int:
    said = {group.get("num_bits") for group in _weight_settings(settings)}
    bits = [
        bits
        for bits in _BITS
        if len(shape) == 2
        and stored == (shape[0], -(-shape[1] * bits // 32))
        and (not said or bits in said)
    ]
    if len(bits) != 1:
        raise ValueError(
            f"{stored} integers for a weight {shape}, num_bits "
            f"{sorted(said, key=str)}: only bits {_BITS} are decoded"
        )
    return bits[0]


def _block(
    grid: tuple[int, ...], shape: tuple[int, int], settings: Settings
) -> tuple[int, int]:
    """Returns rows and inputs that share a scale, from the number of scales."""
    if math.prod(grid) == 1:
        return shape
    # Sizes that the settings say come first: of a single row of short blocks the
    # shapes alone would tell other ones.
    sizes = [_block_size(group) for group in _weight_settings(settings)]
    for rows, columns in (size for size in sizes if size is not None):
        if grid == (-(-shape[0] // rows), -(-shape[1] // columns)):
            return rows, columns
    if len(grid) == 2 and grid[0] in (1, shape[0]) and shape[1] % (grid[1] or 1) == 0:
        return shape[0] // grid[0], shape[1] // (grid[1] or 1)
    raise ValueError(f"{grid} scales of a weight {shape}: no such blocks")


def _block_size(settings: Settings) -> tuple[int, int] | None:
    """Returns the rows and inputs of a block that settings of a group say."""
    structure, size = settings.get("block_structure"), settings.get("group_size")
    given = structure if isinstance(structure, list) else [1, size]
    if len(given) == 2 and all(type(s) is int and s > 0 for s in given):
        return given[0], given[1]
    return None


def _grid(source: Source, name: str) -> Codes:
    return Scalar(name) if math.prod(source.shape(name)) == 1 else Plain(name)


def _formats(settings: Settings) -> Iterator[Any]:
    yield settings.get("format", "dense")
    for group in _groups(settings):
        if group.get("format") is not None:
            yield group["format"]


def _groups(settings: Settings) -> list[Settings]:
    groups = settings.get("config_groups") or {}
    return [group for group in groups.values() if isinstance(group, dict)]


def _weight_settings(settings: Settings) -> list[Settings]:
    found = (group.get("weights") for group in _groups(settings))
    return [weights for weights in found if isinstance(weights, dict)]
