"""Sends of tokens to their experts, in their own dtype or in float8."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from fsdp_jax.ops.moe._packed_rows import pack, unpack
from fsdp_jax.ops.moe._routes import Route, Rows, Tokens

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
RECEIVED = "received_tokens"
"""`checkpoint_name` of the tokens that came from other ranks."""


def receive(
    route: Route, x: Tokens, dispatch_dtype: jnp.dtype | None, ranks: int
) -> Rows:
    """Sends tokens as `send` does, and names what came from other ranks.

    A `remat_policy` that saves it by that name does not send it again in backward.

    Args:
      route: Route of the tokens.
      x: Tokens.
      dispatch_dtype: As of `send`.
      ranks: Ranks that share the experts.
    """
    rows = send(route, x, dispatch_dtype)
    return rows if ranks == 1 else checkpoint_name(rows, RECEIVED)


def send(route: Route, x: Tokens, dispatch_dtype: jnp.dtype | None) -> Rows:
    """Sends each token to the experts that it chose.

    Tokens, and with `combine` the gradients of their sums, go there in this dtype. What
    comes back, outputs and the gradients of tokens, keeps its own: these are summed by
    token, and a rounding of each would add to the sum.

    Args:
      route: Route of the tokens.
      x: Tokens, or as many gradients.
      dispatch_dtype: float8_e4m3fn; None for the dtype of `x`.

    Returns:
      Rows sorted by expert, in the dtype of `x`.
    """
    if dispatch_dtype is None:
        return route.there(route.per_choice(x))
    return _send_float8(route, x)


@jax.custom_vjp
def _send_float8(route: Route, x: Tokens) -> Rows:
    """Rounds a token once, before it is repeated for its experts.

    What is sent are bytes: XLA could move the conversion of a float8 array across the
    collective, and then send more. One rank rounds as several do, so that the numbers
    do not depend on how many ranks share the experts.
    """
    packed = route.there(route.per_choice(pack(x)))
    return unpack(packed, x.shape[-1], x.dtype)


def _forward(route, x):
    return _send_float8(route, x), route


def _backward(route, grad: Rows):
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
