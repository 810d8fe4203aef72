"""What the models of compositions share, and how they are called.

All are one computation: a layer is `x + tanh(norm(x @ up) + bias) * mask @ down`. What
is ours comes in as `Tools`, so that the same model runs in plain jax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from composition.compositions import Composition

INPUTS, TOKENS, DROPPED = 3, 4, 0.3


@dataclasses.dataclass(frozen=True)
class Tools:
    """What runs layers: fsdp_jax's, or plain jax's.

    Attributes:
      unit: Marks a function of weights.
      scan: `scan(unit, stacked, carry, xs, **options)`.
    """

    unit: Callable[..., Any]
    scan: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Built:
    """A model that can be made, and called.

    Attributes:
      make: Takes a key.
      units: What `fully_shard` takes.
      apply: `apply(model, x, masks) -> (y, balance, new)`; `new` holds new values of
        arrays that are no parameters, None if they are in the model.
    """

    make: Callable[[Any], Any]
    units: tuple[Any, ...]
    apply: Callable[..., Any]


def drawn(key, *shape, index=0):
    """Numbers of mean 0 and variance `1 / shape[0]`, as a function of a key.

    Not of jax.random, whose programs would take longer to compile than a step.
    """
    first, second = jax.random.key_data(key).astype(jnp.float64)
    phase = jnp.mod(first, 9973.0) + jnp.mod(second, 9973.0) + 0.7 * index
    place = jnp.arange(math.prod(shape), dtype=jnp.float64).reshape(shape)
    return jnp.sin(phase + 12.9898 * place) * (2 / shape[0]) ** 0.5


def block_shapes(case: Composition) -> dict[str, tuple[int, ...]]:
    """Parameters of one layer."""
    inner = case.width + (2 if case.axes["tp"] > 1 else 1)
    shapes = {"up": (case.width, inner), "bias": (inner,), "down": (inner, case.width)}
    if case.sharing == "nested":
        shapes["inner"] = (case.width, case.width)
    return shapes


def root_shapes(case: Composition) -> dict[str, tuple[int, ...]]:
    shapes = {"embed": (INPUTS, case.width)}
    if case.sharing != "tied":
        shapes["head"] = (case.width, INPUTS)
    return shapes


def weights(key, shapes):
    return {
        name: drawn(key, *shape, index=index)
        for index, (name, shape) in enumerate(shapes.items())
    }


def layer(get, x, mask, norm=None, inner=None, table=None):
    """One layer on rows, or on one row, and what it adds to the loss."""
    table = jnp.ones(x.shape[-1]) if table is None else table
    h = (x * table.reshape((1,) * (x.ndim - 1) + (-1,))) @ get("up")
    h = h if norm is None else norm(h)
    h = jnp.tanh(h + get("bias").reshape((1,) * (x.ndim - 1) + (-1,)))
    x = x + (h * mask) @ get("down")
    x = x if inner is None else inner(x)
    return x, jnp.mean(x**2)


def table_of(case):
    """What a layer scales its input by, and no optimizer is to change."""
    return jnp.linspace(0.5, 1.5, case.width)


def twist(w, x):
    return x + 0.5 * jnp.tanh(x @ w)


def enter(get, x):
    return x @ get("embed")


def leave(case, get, x):
    return x @ (get("embed").T if case.sharing == "tied" else get("head"))


def trunk(case, call_layers, call_shared, x, masks):
    """The layers, and the one that is used between them again and again."""
    balance = jnp.zeros((), x.dtype)
    for _ in range(2 if case.sharing == "repeated" else 1):
        if case.sharing == "shared":
            x, more = call_shared(x, masks[0])
            balance = balance + more
        x, more = call_layers(x, masks)
        balance = balance + more
    if case.sharing == "shared":
        x, more = call_shared(x, masks[1])
        balance = balance + more
    return x, balance


def one_by_one(calls, x, masks):
    balance = jnp.zeros((), x.dtype)
    for call, mask in zip(calls, masks, strict=True):
        x, more = call(x, mask)
        balance = balance + more
    return x, balance


def scan_options(case):
    return {"prefetch": case.prefetch, "unroll": case.unroll}


def called(block):
    """`call(own, x, mask)` of a module, which has its own weights."""
    return lambda _, x, mask: block(x, mask)


def in_float64(tree):
    def wide(x):
        is_float = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.float64) if is_float else x

    return jax.tree.map(wide, tree)
