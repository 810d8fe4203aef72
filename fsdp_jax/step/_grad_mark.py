"""A primitive that marks a parameter's gradient where it leaves its unit."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

GRADIENT = core.Primitive("fsdp_gradient")


def mark_gradient(grad: Array, name: str, ndim_in_unit: int) -> Array:
    """Returns `grad`, marked for `gradient_flow`.

    Args:
      grad: This device's piece of a gradient, `[*stacked, *unit]`.
      name: Name of the parameter.
      ndim_in_unit: Number of dims of `unit`. `jax.vmap` puts its dim in front of these,
        which is why this is a primitive of its own and not `checkpoint_name`.
    """
    return GRADIENT.bind(grad, name=name, ndim_in_unit=ndim_in_unit)


@GRADIENT.def_impl
def _run(grad: Array, **_: Any) -> Array:
    return grad


@GRADIENT.def_abstract_eval
def _shape_of(grad: Any, **_: Any) -> ShapedArray:
    return ShapedArray(grad.shape, grad.dtype)


def _batch(args: Any, dims: Any, **params: Any) -> tuple[Array, int]:
    ((grad,), (dim,)) = args, dims
    return GRADIENT.bind(jnp.moveaxis(grad, dim, 0), **params), 0


# The mark is in backward only, but a loss that takes derivatives itself is
# differentiated through it.
ad.deflinear2(GRADIENT, lambda cotangent, _, **__: [cotangent])
batching.primitive_batchers[GRADIENT] = _batch
mlir.register_lowering(GRADIENT, lambda _, grad, **__: [grad])
