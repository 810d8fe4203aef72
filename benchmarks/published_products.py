"""Products in 8-bit floats: what libraries' kernels compute and move, not numbers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name


def to_float8(scaling, x, dtype):
    """Values in 8-bit floats.

    Delayed scales are known before: finding the next ones is part of the kernel that
    casts, and moves no more bytes, so that a constant stands for them.
    """
    scale = jnp.float32(1)
    if scaling == "current":
        most = float(jnp.finfo(dtype).max)
        scale = jnp.max(jnp.abs(x)).astype(jnp.float32) / most + 1e-9
    return (x.astype(jnp.float32) / scale).astype(dtype)


def product8(a, b, dims):
    """Product in bfloat16, not scaled: libraries' kernels scale what they write."""
    dims = (dims, ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.bfloat16)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def linear8(scaling, name, x, w):
    """`x @ w` for a matrix `x`, in 8-bit floats; `name` is that of `x` in them."""
    return _forward8(scaling, name, x, w)[0]


def _forward8(scaling, name, x, w):
    x8 = checkpoint_name(to_float8(scaling, x, jnp.float8_e4m3fn), name)
    w8 = to_float8(scaling, w, jnp.float8_e4m3fn)
    return product8(x8, w8, ((1,), (0,))), (x8, w8)


def _backward8(scaling, name, saved, g):
    del name
    x8, w8 = saved
    g8 = to_float8(scaling, g, jnp.float8_e5m2)
    return product8(g8, w8, ((1,), (1,))), product8(x8, g8, ((0,), (0,)))


linear8.defvjp(_forward8, _backward8)
