"""Sends of tokens to their experts, in their own dtype or in float8."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fsdp_jax.ops.moe._packed_rows import pack, unpack
from fsdp_jax.ops.moe._routes import Route, Rows, Tokens

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)


def send(
    route: Route, x: Tokens, dispatch_dtype: jnp.dtype | None, *, again: bool = False
) -> Rows:
    """Sends each token to the experts that it chose.

    Tokens, and with `combine` the gradients of their sums, go there in this dtype. What
    comes back, outputs and the gradients of tokens, keeps its own: these are summed by
    token, and a rounding of each would add to the sum.

    Args:
      route: Route of the tokens.
      x: Tokens, or as many gradients.
      dispatch_dtype: float8_e4m3fn; None for the dtype of `x`.
      again: Whether others are sent there in the same pass.

    Returns:
      Rows sorted by expert, in the dtype of `x`.
    """
    if dispatch_dtype is None:
        return route.there(route.per_choice(x), again=again)
    return _send_float8(again, route, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send_float8(again: bool, route: Route, x: Tokens) -> Rows:
    """Rounds a token once, before it is repeated for its experts.

    What is sent are bytes: XLA could move the conversion of a float8 array across the
    collective, and then send more. One rank rounds as several do, so that the numbers
    do not depend on how many ranks share the experts.
    """
    return _packed(again, route, x)


def _packed(again: bool, route: Route, x: Tokens) -> Rows:
    packed = route.there(route.per_choice(pack(x)), again=again)
    return unpack(packed, x.shape[-1], x.dtype)


def _forward(again, route, x):
    # Not the function itself: a `remat_policy` sees no name within a `custom_vjp`.
    return _packed(again, route, x), route


def _backward(again, route, grad: Rows):
    del again
    # As if tokens were not rounded. Sums of 16-bit numbers are taken in float32.
    return None, route.by_token(route.back(grad)).sum(1)


_send_float8.defvjp(_forward, _backward)


def check_dispatch_dtype(dtype: DTypeLike | None) -> jnp.dtype | None:
    """Returns the dtype, if tokens can be sent in it.

    Raises:
      ValueError: If not.
    """
    if dtype is None:
        return None
    if jnp.dtype(dtype) != FLOAT8:
        raise ValueError(
            f"dispatch_dtype={jnp.dtype(dtype).name} is not a dtype that tokens are "
            f"sent in: use {FLOAT8.name}, or None for the dtype of the tokens."
        )
    return FLOAT8
