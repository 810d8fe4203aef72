"""FSDP's collectives: all-gather of a shard, reduce-scatter of a gradient.

| when | collective | mesh axes | dtype |
|---|---|---|---|
| forward, at a unit's entry | all-gather | `placements.parameter` | `param` or float8 |
| backward, if `reshard` | all-gather | `placements.parameter` | `param` or float8 |
| backward, after the unit | reduce-scatter | `placements.gradient` | `grad_comm` |
| once a step, deferred | reduce-scatter | others of `optimizer` | `grad_comm` |
| once a step, deferred | all-reduce | all others still partial | `grad_comm` |

The first three are `fsdp_gather` and its derivative, the last two `reduce_deferred`.
These run after the last microbatch, or in its backward where `GradReduction.axes` names
axes: `training/_microbatch_grads.py` decides which, `pipeline/_gradients.py` for
stages. With `precision.accumulate_wide` an all-to-all and a local sum replace each
reduce-scatter, and the all-reduce is in `main_grads`. The all-gathers that run once a
step, before the first microbatch, are in `_param_layout`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float

from fsdp_jax._scopes import (
    ALL_REDUCE,
    FSDP_GATHER,
    REDUCE_DEFERRED,
    REDUCE_SCATTER,
    traced_as,
)
from fsdp_jax._tp_shards import on_tp_shards
from fsdp_jax.sharding._block_float8_gather import (
    BlockFloat8Gather,
    decode_block_float8,
)
from fsdp_jax.sharding._float8_gather import (
    Float8Gather,
    Quantized,
    decode_float8,
    decode_mxfp8,
)
from fsdp_jax.sharding._nvfp4_gather import NVFP4Gather, decode_nvfp4
from fsdp_jax.sharding._offload import on_device
from fsdp_jax.sharding._plan import ParamPlan
from fsdp_jax.sharding._precision import at_least_float32
from fsdp_jax.step._gathered import Gathered
from fsdp_jax.step._grad_mark import mark_gradient
from fsdp_jax.step._shard import GradReduction, Shard


def gather_weight(shard: Shard) -> Gathered:
    """All-gathers one parameter in its compute dtype; its gradient is reduce-scattered.

    Call it inside `shard_map`, manual over the axes that split the parameter.

    Args:
      shard: A parameter of one unit, without stacked dims; in host memory if it is
        streamed.

    Returns:
      The unsharded weight, dtype `precision.param`, on the device; with the bits of
      `Float8Gather`, which have no gradient.

    Raises:
      ValueError: If stacked dims are left, or dims are missing because a parameter that
        was planned as not stacked turns out to be a stack.
    """
    if shard.value.ndim != shard.param.ndim_in_unit:
        raise ValueError(_wrong_rank(shard))
    return fsdp_gather(
        shard.param,
        shard.reduction,
        shard.value,
        shard.grad_buffer,
        shard.accumulated_grad,
    )


def reduce_deferred(
    param: ParamPlan, grad: Float[Array, ...], deferred_axes: tuple[str, ...]
) -> Float[Array, ...]:
    """Runs the deferred reduction: over the axes on which a gradient is still partial.

    Args:
      param: The parameter's plan.
      grad: Accumulated gradient on this device, or one unit's slice of it, split over
        `placements.gradient`.
      deferred_axes: Mesh axes over which `grad` is still partial.

    Returns:
      The gradient summed over `deferred_axes`, split over `placements.optimizer`, dtype
      `precision.main_grads`.
    """
    scattered = tuple(a for a in param.placements.optimizer if a in deferred_axes)
    summed = tuple(axis for axis in deferred_axes if axis not in scattered)
    with jax.named_scope(REDUCE_DEFERRED):
        if scattered:
            grad = _reduce_scatter(param, grad, scattered)
        if summed:
            # An all-reduce cannot sum wider than it communicates, as the all-to-all in
            # `_reduce_scatter` can, so the wide sum is communicated wide.
            wide = param.precision.accumulate_wide
            dtype = param.precision.main_grads if wide else param.precision.grad_comm
            grad = _all_reduce(param, grad.astype(dtype), summed)
    return grad.astype(param.precision.main_grads)


# Why a custom derivative: jax would transpose the all-gather to a reduce-scatter over
# the same axes, in the compute dtype, and require a cotangent of the shape and dtype of
# `value`. But a gradient has its own placement (ZeRO-2 splits gradients and not
# weights) and its own dtypes (`grad_comm` between devices, `main_grads` to accumulate),
# and the bytes of a quantized weight have no derivative. So `value` gets no cotangent,
# and the gradient is that of `grad_buffer`, zeros that forward never reads.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
@traced_as(FSDP_GATHER)
def fsdp_gather(
    param: ParamPlan,
    reduction: GradReduction,
    value: Any,
    grad_buffer: Array | None,
    accumulated_grad: Array | None,
) -> Gathered:
    del reduction, grad_buffer, accumulated_grad  # Read by backward; see `Shard`.
    if param.is_streamed:
        value = on_device(value)
    # Cast before the collective, which then communicates the narrower dtype.
    if param.gather is None:
        value = value.astype(param.precision.param)
    axes = param.placements.parameter
    weight = all_gather(param, value, axes) if axes else value
    if isinstance(param.gather, Float8Gather):
        bits = _as_in_unit(param, weight.bytes)
        with jax.named_scope("decode"):
            number = decode_float8(Quantized(bits, weight.scale), param.precision.param)
        return Gathered(number, bits, weight.scale)
    if param.gather is not None:
        weight = _decode(param, weight)
    return Gathered(_as_in_unit(param, weight))


def _gather_forward(
    param: ParamPlan, reduction: GradReduction, value, grad_buffer, accumulated_grad
):
    # Without `grad_buffer`, backward needs the value's shape and dtype, for
    # `marked_zeros`.
    unmarked = value if grad_buffer is None else None
    return fsdp_gather(param, reduction, value, grad_buffer, accumulated_grad), (
        unmarked,
        accumulated_grad,
    )


def _gather_backward(
    param: ParamPlan, reduction: GradReduction, residuals, grads: Gathered
):
    (value, accumulated_grad), grad = residuals, grads.weight
    if value is not None:
        return marked_zeros(param, value), None, None
    if param.is_frozen:
        return None, None, None
    # The steps of forward in reverse: the factored dim, the padding, the collective.
    if param.split.is_factored:
        dim = param.split.tensor_dim
        assert dim is not None
        grad = _with_factored_dim(param, grad, param.shape[dim], param.shape[dim + 1])
    if reduction.scale != 1.0 and not param.is_overwritten:
        # In the wide dtype, and after backward: the loss itself, scaled, would make the
        # small gradients of a float16 model vanish.
        wide = at_least_float32(grad.dtype)
        grad = grad.astype(wide) * jnp.asarray(reduction.scale, wide)
    if param.split.padding:
        widths = [(0, 0)] * grad.ndim
        widths[_split_dim(param, grad)] = (0, param.split.padding)
        grad = jnp.pad(grad, widths)
    if axes := param.placements.gradient:
        grad = _reduce_scatter(param, grad, axes)
    grad = grad.astype(param.precision.main_grads)
    # Before the deferred reduction, which then runs once for all microbatches.
    if accumulated_grad is not None:
        grad = accumulated(param, grad, accumulated_grad)
    if reduction.axes:
        grad = reduce_deferred(param, grad, reduction.axes)
    return None, mark_gradient(grad, param.name, param.ndim_in_unit), None


fsdp_gather.defvjp(_gather_forward, _gather_backward)


def marked_zeros(param: ParamPlan, value: Any) -> Any:
    """Returns a zero cotangent for a shard without a gradient, marked like a gradient.

    Only a derivative taken inside the loss asks for it. The mark lets `check_loss` find
    and refuse that derivative. None for quantized and integer weights.
    """
    if isinstance(value, Quantized) or not jnp.issubdtype(value.dtype, jnp.floating):
        return None
    zeros = jnp.zeros_like(value)
    marked = mark_gradient(zeros, param.name, param.ndim_in_unit)
    # jax wants a cotangent in the memory of its value.
    return (
        jax.device_put(marked, jax.memory.Space.Host) if param.is_streamed else marked
    )


def accumulated(param: ParamPlan, grad: Array, new: Array) -> Array:
    """Adds two gradients; takes the maximum where `overwrite_with_gradient`."""
    return jnp.maximum(grad, new) if param.is_overwritten else grad + new


def all_gather(param: ParamPlan, value: Any, axes: tuple[str, ...]) -> Any:
    """All-gathers the split dim of an array, or of a `Quantized` and its scales."""
    if isinstance(value, Quantized):
        scale = value.scale
        if not isinstance(param.gather, Float8Gather):  # Whose scale is agreed on.
            scale = all_gather(param, scale, axes)
        return Quantized(
            all_gather(param, value.bytes, axes), scale, value.tensor_scale
        )
    dim = _split_dim(param, value)

    def gather(piece):
        with _may_be_pipelined():
            return lax.all_gather(piece, axes, axis=dim, tiled=True)

    with jax.named_scope("all_gather"):
        return at_tp_width(param, gather, value)


def _may_be_pipelined() -> Any:
    """Marks collectives for XLA's own pipelining of what is marked.

    It does nothing but with `compiler_options(pipelining="marked")`.
    """
    return set_xla_metadata(is_pipelineable=True)


def _decode(param: ParamPlan, quantized: Quantized) -> Array:
    """Dequantizes a weight with scales of blocks to its compute dtype."""
    dtype = param.precision.param
    with jax.named_scope("decode"):
        blocks, axis = Quantized(quantized.bytes, quantized.scale), param.block_dim
        if isinstance(param.gather, NVFP4Gather):
            return at_tp_width(
                param,
                lambda e, tensor: decode_nvfp4(e, tensor, axis, dtype),
                *(blocks, quantized.tensor_scale),
            )
        if isinstance(param.gather, BlockFloat8Gather):
            dims, pieces = tile_dims(param), lax.axis_size(param.placements.optimizer)
            return at_tp_width(
                param, lambda e: decode_block_float8(e, dims, pieces, dtype), blocks
            )
        return at_tp_width(param, lambda e: decode_mxfp8(e, axis, dtype), blocks)


def _as_in_unit(param: ParamPlan, x: Array) -> Array:
    """Returns a gathered array in the dims that a model sees, without padding."""
    # The padding is zeros at the end of the split dim.
    if param.split.padding:
        dim = _split_dim(param, x)
        x = lax.slice_in_dim(x, 0, x.shape[dim] - param.split.padding, axis=dim)
    return _with_factored_dim(param, x, -1) if param.split.is_factored else x


def tile_dims(param: ParamPlan) -> tuple[int, int]:
    """Returns the dims of a `BlockFloat8Gather`'s blocks, counted from the end."""
    assert param.split.dim is not None
    return param.split.dim - len(param.shape), param.block_dim


def _all_reduce(param: ParamPlan, grad: Array, axes: tuple[str, ...]) -> Array:
    reduce = lax.pmax if param.is_overwritten else lax.psum
    with jax.named_scope(ALL_REDUCE):
        return at_tp_width(param, lambda grad: reduce(grad, axes), grad)


def _reduce_scatter(param: ParamPlan, grad: Array, axes: tuple[str, ...]) -> Array:
    """Sums `grad` over `axes`; each rank keeps its piece of the split dim."""
    dim = _split_dim(param, grad)

    def reduce(grad):
        if not param.precision.accumulate_wide:
            with _may_be_pipelined():
                return lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
        # The bytes of a reduce-scatter, but partial sums are not rounded to
        # `grad_comm`: each rank gets all addends of its piece and sums them itself.
        pieces = lax.all_to_all(grad, axes, split_axis=dim, concat_axis=dim, tiled=True)
        before, size, after = grad.shape[:dim], grad.shape[dim], grad.shape[dim + 1 :]
        ranks = lax.axis_size(axes)
        # This rank's piece, one from every rank: `[*before, ranks, piece, *after]`.
        by_rank = pieces.reshape(*before, ranks, size // ranks, *after)
        return by_rank.sum(axis=dim, dtype=param.precision.main_grads)

    with jax.named_scope(REDUCE_SCATTER):
        return at_tp_width(param, reduce, grad.astype(param.precision.grad_comm))


def at_tp_width(
    param: ParamPlan, collective: Callable[..., Any], x: Any, *others: Any
) -> Any:
    """Runs a collective over data axes on this rank's `tp` shard of a parameter.

    All ranks of `tp` have the same `others`.
    """
    if not param.is_under_tp:
        return collective(x, *others)
    dim = param.split.tensor_dim
    if dim is not None:
        # `tensor_dim` counts stacked dims, which a unit's slice does not have.
        dim -= len(param.shape) - x.ndim
    return on_tp_shards(collective, x, dim, *others)


def _with_factored_dim(param: ParamPlan, x: Array, *sizes: int) -> Array:
    """Reshapes a unit's slice where `ParamPlan.step_layout` factored a dim into two."""
    assert param.split.tensor_dim is not None
    dim = param.split.tensor_dim - param.num_stacked
    behind = param.shape[param.split.tensor_dim + 2 :]
    return x.reshape(*x.shape[:dim], *sizes, *behind)


def _split_dim(param: ParamPlan, x: Array) -> int:
    """Returns the split dim of `x`, a parameter or a unit's slice without its stack."""
    assert param.split.dim is not None
    return param.split.dim - (len(param.shape) - x.ndim)


def _wrong_rank(shard: Shard) -> str:
    param, ndim = shard.param, shard.value.ndim
    num_dims = param.num_stacked + param.ndim_in_unit - ndim
    told = f", num_dims={num_dims}" if num_dims > 1 else ""
    advice = (
        f"It is stacked along {num_dims} leading dim(s): plan its unit with "
        f"units=[fsdp.Stacked(...{told})]."
        if ndim < param.ndim_in_unit
        else "Scan over the stack (fsdp.scan, jax.lax.scan, nnx.scan) instead of "
        "entering the unit with all of it."
    )
    return (
        f"'{param.name}' of unit '{param.unit}' is planned with shape {param.shape}, "
        f"{param.num_stacked} stacked dim(s), but enters its unit with {ndim} dims "
        f"instead of {param.ndim_in_unit}. {advice}"
    )
