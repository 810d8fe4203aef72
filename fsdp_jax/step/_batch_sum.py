"""A primitive that sums gradients over the dims of `jax.vmap` before a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

SUM_OVER_BATCH = core.Primitive("fsdp_sum_over_batch")


def sum_over_batch(grads: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
    """Sums gradients over what `jax.vmap` maps and their weights do not.

    A loss that maps a model over its rows has one weight for all rows. Under
    `jax.vmap`, jax maps the backward of a custom derivative and sums its results: each
    row would have a gradient, and a reduction over devices, of its own.

    Args:
      grads: Gradients; without `jax.vmap` they are returned as they are.
      weights: Weight of each gradient, of the same shape. One that is mapped too has a
        gradient for each of its members.
    """
    pairs = zip(grads, weights, strict=True)
    return [SUM_OVER_BATCH.bind(grad, weight) for grad, weight in pairs]


@SUM_OVER_BATCH.def_impl
def _run(grad: Array, weight: Array) -> Array:
    del weight
    return grad


@SUM_OVER_BATCH.def_abstract_eval
def _shape_of(grad: Any, weight: Any) -> ShapedArray:
    del weight
    return ShapedArray(grad.shape, grad.dtype)


def _batch(args: Sequence[Array], dims: Sequence[Any]) -> tuple[Array, Any]:
    (grad, weight), (dim, dim_of_weight) = args, dims
    if dim_of_weight is not None:
        size = weight.shape[dim_of_weight]
        grad = batching.bdim_at_front(grad, dim, size)
        weight = jnp.moveaxis(weight, dim_of_weight, 0)
        return SUM_OVER_BATCH.bind(grad, weight), 0
    if dim is not None:
        grad = grad.sum(dim)
    return SUM_OVER_BATCH.bind(grad, weight), None


def _transposed(cotangent: Array, grad: Any, weight: Any) -> list[Any]:
    del grad, weight
    return [cotangent, None]


# Linear in the gradient, for a loss that takes derivatives itself.
ad.deflinear2(SUM_OVER_BATCH, _transposed)
batching.primitive_batchers[SUM_OVER_BATCH] = _batch
mlir.register_lowering(SUM_OVER_BATCH, lambda _, grad, weight: [grad])
