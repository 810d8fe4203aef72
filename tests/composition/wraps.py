"""Transformations around all units of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from composition.compositions import Composition

HALF = 0.5
"""What the rule of `custom_vjp` multiplies gradients by."""


def around_all(
    case: Composition, run: Callable[..., Any], own: Any, whole: Any, x: Any, masks: Any
) -> tuple[Any, Any]:
    """`run(own, x, masks) -> (x, rest)` under the transformation of the case.

    Without it where that is around each unit.

    Args:
      case: Says which.
      run: The layers.
      own: The weights of units, where these are a tree.
      whole: A weight that is in no unit, on which a decision may depend.
      x: `[rows, tokens, width]`.
      masks: `[layers, rows, 1, inner]`.
    """
    name = case.wrap if case.around == "all" else "none"
    return _WRAPS[name](run, own, whole, x, masks)


def around_each(
    case: Composition, call: Callable[..., Any], own: Any, whole: Any
) -> Callable[..., Any]:
    """`call(own, x, mask) -> (x, rest)` of one unit as a function of `(x, mask)`.

    Under the transformation of the case, if that is around each unit.
    """
    name = case.wrap if case.around == "each" else "none"

    def run(own, x, masks):
        return call(own, x, masks[0])

    def of_rows(x, mask):
        return _WRAPS[name](run, own, whole, x, mask[None])

    return of_rows


def _none(run, own, whole, x, masks):
    return run(own, x, masks)


def _vmap(run, own, whole, x, masks):
    def row(x, masks):
        return run(own, x, masks)

    x, rest = jax.vmap(row, in_axes=(0, 1))(x, masks)
    return x, jax.tree.map(lambda leaf: jnp.mean(leaf, 0), rest)


def _scan(run, own, whole, x, masks):
    x, rest = jax.lax.scan(lambda x, _: run(own, x, masks), x, length=2)
    return x, jax.tree.map(lambda leaf: jnp.sum(leaf, 0), rest)


def _cond(run, own, whole, x, masks):
    def zeros(x):
        shapes = jax.eval_shape(lambda x: run(own, x, masks)[1], x)
        return x, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    decides = jnp.sum(whole) < 1e9
    return jax.lax.cond(decides, lambda x: run(own, x, masks), zeros, x)


def _checkpoint(run, own, whole, x, masks):
    return jax.checkpoint(run)(own, x, masks)


def _jit(run, own, whole, x, masks):
    return jax.jit(lambda x, masks: run(own, x, masks))(x, masks)


def _custom_vjp(run, own, whole, x, masks):
    @jax.custom_vjp
    def ruled(own, x, masks):
        return run(own, x, masks)

    def backward(residuals, grad):
        d_own, dx, d_masks = jax.vjp(run, *residuals)[1](grad)
        return jax.tree.map(lambda g: g * HALF, d_own), dx, d_masks

    ruled.defvjp(lambda *args: (run(*args), args), backward)
    return ruled(own, x, masks)


_WRAPS = {
    "none": _none,
    "vmap": _vmap,
    "scan": _scan,
    "cond": _cond,
    "checkpoint": _checkpoint,
    "jit": _jit,
    "custom_vjp": _custom_vjp,
}
