"""The two collectives of FSDP: a shard becomes a weight, a gradient becomes a shard."""

from __future__ import annotations

import functools

import jax
from jax import lax
from jaxtyping import Array, Float

from fsdp_jax._plan import ParamPlan
from fsdp_jax._shard import Shard


def gather_weight(shard: Shard) -> Float[Array, ...]:
    """All-gathers one parameter in its compute dtype; its gradient is reduce-scattered.

    Call it inside `shard_map`, manual over the axes that split the parameter.

    Args:
      shard: One unit's slice of a parameter (stack dims sliced away).

    Returns:
      The whole weight, dtype `precision.param`.

    Raises:
      ValueError: If stack dims are left, or dims are missing because a parameter that
        was planned as plain turns out to be a stack.
    """
    if shard.value.ndim != shard.row.ndim_in_unit:
        raise ValueError(_wrong_rank(shard))
    return _gather(shard.row, shard.value, shard.sink)


def enter_step(row: ParamPlan, value: Float[Array, ...]) -> Float[Array, ...]:
    """Brings a parameter from where it rests to where it is within the step.

    Args:
      row: The parameter's plan.
      value: This device's piece at rest, split over `placements.optimizer`.

    Returns:
      The piece split over `placements.parameter`. What has to be gathered for that
      travels in the compute dtype, once a step whatever the number of microbatches.
    """
    axes = tuple(
        axis
        for axis in row.placements.optimizer
        if axis not in row.placements.parameter
    )
    if not axes:
        return value
    assert row.dim is not None
    value = value.astype(row.precision.param)
    return lax.all_gather(value, axes, axis=row.dim, tiled=True)


def reduce_rest(
    row: ParamPlan, grad: Float[Array, ...], data_axes: tuple[str, ...]
) -> Float[Array, ...]:
    """Finishes a gradient after the last microbatch, over the axes still partial.

    Args:
      row: The parameter's plan.
      grad: This device's accumulated gradient, split over `placements.gradient`.
      data_axes: Axes whose ranks saw different data.

    Returns:
      The gradient summed over all `data_axes`, split over `placements.optimizer`.
    """
    partial = [axis for axis in data_axes if axis not in row.placements.gradient]
    scattered = tuple(a for a in row.placements.optimizer if a in partial)
    summed = tuple(axis for axis in partial if axis not in scattered)
    if not partial:
        return grad
    if scattered:
        assert row.dim is not None
        grad = _reduce_scatter(row, grad, scattered, row.dim)
    if summed:
        wide = row.precision.accumulate_wide
        wire = row.precision.main_grads if wide else row.precision.grad_comm
        grad = lax.psum(grad.astype(wire), summed)
    return grad.astype(row.precision.main_grads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(row: ParamPlan, value: Array, sink: Array) -> Array:
    del sink  # Carries the gradient out; see `Shard`.
    weight = value.astype(row.precision.param)
    axes = row.placements.parameter
    if not axes:
        return weight
    return lax.all_gather(weight, axes, axis=_dim_in_unit(row), tiled=True)


def _gather_forward(row: ParamPlan, value: Array, sink: Array):
    return _gather(row, value, sink), None


def _gather_backward(row: ParamPlan, _, grad: Array):
    axes = row.placements.gradient
    if axes:
        grad = _reduce_scatter(row, grad, axes, _dim_in_unit(row))
    return None, grad.astype(row.precision.main_grads)


_gather.defvjp(_gather_forward, _gather_backward)


def _reduce_scatter(
    row: ParamPlan, grad: Array, axes: tuple[str, ...], dim: int
) -> Array:
    """Sums over `axes`, each rank keeping its piece of `dim`."""
    grad = grad.astype(row.precision.grad_comm)
    if not row.precision.accumulate_wide:
        return lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
    pieces = lax.all_to_all(grad, axes, split_axis=dim, concat_axis=dim, tiled=True)
    num_ranks = lax.axis_size(axes)
    before, size, after = pieces.shape[:dim], pieces.shape[dim], pieces.shape[dim + 1 :]
    by_rank = pieces.reshape(*before, num_ranks, size // num_ranks, *after)
    return by_rank.sum(axis=dim, dtype=row.precision.main_grads)


def _dim_in_unit(row: ParamPlan) -> int:
    assert row.dim is not None
    return row.dim - row.num_stacked


def _wrong_rank(shard: Shard) -> str:
    row, ndim = shard.row, shard.value.ndim
    advice = (
        f"Its unit is a stack of {row.ndim_in_unit - ndim} more leading dim(s): plan "
        "it with units=[fsdp.Stacked(...)]."
        if ndim < row.ndim_in_unit
        else "Scan over the stack (fsdp.scan, jax.lax.scan, nnx.scan) instead of "
        "entering the unit with all of it."
    )
    return (
        f"'{row.name}' of unit '{row.unit}' is planned with shape {row.shape}, "
        f"{row.num_stacked} stacked dim(s), but enters its unit with {ndim} dims "
        f"instead of {row.ndim_in_unit}. {advice}"
    )
