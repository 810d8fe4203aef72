"""The start of a step: parameters go from stored to step placements, quantized."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fsdp_jax._scopes import GATHER_FOR_STEP
from fsdp_jax.sharding._block_float8_gather import (
    BlockFloat8Gather,
    encode_block_float8,
)
from fsdp_jax.sharding._float8_gather import (
    MXFP8Gather,
    Quantized,
    encode_float8,
    encode_mxfp8,
)
from fsdp_jax.sharding._nvfp4_gather import (
    NVFP4Gather,
    encode_nvfp4,
    tensor_exponents,
)
from fsdp_jax.sharding._param_gather import needs_largest
from fsdp_jax.sharding._plan import ParamPlan
from fsdp_jax.step._collectives import all_gather, at_tp_width, tile_dims


def gather_for_step(
    params: Sequence[ParamPlan], values: Sequence[Float[Array, ...]]
) -> list[Array | Quantized]:
    """Gathers each parameter from its stored placement to its placement in the step.

    The all-gather over axes of `placements.optimizer` that are not in
    `placements.parameter` runs once a step, for any number of microbatches. It
    communicates one byte an element if the parameter is quantized, else the compute
    dtype.

    Args:
      params: Plans of the parameters.
      values: This device's stored pieces, split over `placements.optimizer`.

    Returns:
      The pieces split over `placements.parameter`, quantized where `gather` is set.
    """
    pairs = list(zip(params, values, strict=True))
    with jax.named_scope(GATHER_FOR_STEP):
        largest = _agreed([pair for pair in pairs if needs_largest(pair[0].gather)])
        return [
            _gathered_for_step(param, value, largest.get(param.name))
            for param, value in pairs
        ]


def _gathered_for_step(
    param: ParamPlan, value: Array, largest: Array | None
) -> Array | Quantized:
    placements = param.placements
    axes = tuple(a for a in placements.optimizer if a not in placements.parameter)
    # Quantized or cast before the all-gather, to communicate fewer bytes.
    entered: Array | Quantized = value
    if param.gather is not None:
        entered = _quantized(param, value, largest)
    elif axes:
        entered = value.astype(param.precision.param)
    return all_gather(param, entered, axes) if axes else entered


def _quantized(param: ParamPlan, value: Array, largest: Array | None) -> Quantized:
    if isinstance(param.gather, MXFP8Gather):
        return at_tp_width(param, lambda v: encode_mxfp8(v, param.block_dim), value)
    if isinstance(param.gather, BlockFloat8Gather):
        dims = tile_dims(param)
        return at_tp_width(param, lambda v: encode_block_float8(v, dims), value)
    assert largest is not None
    if not isinstance(param.gather, NVFP4Gather):
        return encode_float8(value, largest)
    encoded = at_tp_width(
        param, lambda v, size: encode_nvfp4(v, size, param.block_dim), value, largest
    )
    return dataclasses.replace(encoded, tensor_scale=tensor_exponents(largest))


def _agreed(pairs: Sequence[tuple[ParamPlan, Array]]) -> dict[str, Array]:
    """Returns the largest magnitude of each tensor over all ranks, by name."""
    # One all-reduce for all parameters that are split over the same axes.
    agreed = {}
    for axes in dict.fromkeys(param.placements.optimizer for param, _ in pairs):
        own = [pair for pair in pairs if pair[0].placements.optimizer == axes]
        sizes = [_largest(*pair) for pair in own]
        with jax.named_scope("largest"):
            found = lax.pmax(jnp.concatenate([size.ravel() for size in sizes]), axes)
        names = [param.name for param, _ in own]
        agreed |= _taken_apart(names, [size.shape for size in sizes], found)
    return agreed


def _largest(param: ParamPlan, value: Array) -> Float[Array, "*stacked"]:
    """Returns the largest magnitude in each unit's slice of this rank's piece."""
    # Each unit of a stack has a scale of its own: `[*stacked]`.
    dims = tuple(range(param.num_stacked, value.ndim))
    return jnp.abs(value).max(dims).astype(jnp.float32)


def _taken_apart(
    names: Sequence[str], stacks: Sequence[tuple[int, ...]], flat: Array
) -> Iterator[tuple[str, Array]]:
    start = 0
    for name, stack in zip(names, stacks, strict=True):
        size = math.prod(stack)
        yield name, flat[start : start + size].reshape(stack)
        start += size
