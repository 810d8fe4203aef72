"""Weighted sum of the outputs of a token's experts, which are on other ranks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fsdp_jax.ops.moe._routes import Route, Rows, Tokens
from fsdp_jax.ops.moe._send import send


def combine(
    route: Route,
    out: Rows,
    weights: Float[Array, "tokens chosen"],
    dispatch_dtype: jnp.dtype | None,
) -> Tokens:
    """Sends the experts' outputs back, and sums them by token.

    The gradient of a weight is the product of an output with the gradient of the sum.
    Backward takes it where the expert is: it sends the gradients of the sums there,
    which those of the outputs need anyway, and one number of each choice back. So the
    outputs that came back are not kept for backward, and a layer that is recomputed
    does not send them again.

    Args:
      route: Route of the tokens.
      out: Outputs of the experts of this rank, sorted by expert.
      weights: Weight of each chosen expert's output.
      dispatch_dtype: Dtype in which backward sends the gradients of the sums, as for
        `send`.

    Returns:
      The weighted sums, see `Route.summed`.
    """
    return _combine(dispatch_dtype, route, out, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(dispatch_dtype, route, out, weights):
    del dispatch_dtype
    return route.summed(out, weights)


def _forward(dispatch_dtype, route, out, weights):
    return _combine(dispatch_dtype, route, out, weights), (route, out, weights)


def _backward(dispatch_dtype, residuals, grad: Tokens):
    route, out, weights = residuals
    direct, wide = route.direct, jnp.promote_types(out.dtype, jnp.float32)
    # The tokens are sent there too, where the layer is computed again.
    grads = send(route, grad, dispatch_dtype, again=True).astype(wide)
    scales = direct.there(direct.flat(weights.astype(wide)))
    products = (out.astype(wide) * grads).sum(-1, keepdims=True)
    of_weights = direct.by_token(direct.back(products))[..., 0]
    of_out = (grads * scales).astype(out.dtype)
    return None, of_out, of_weights.astype(weights.dtype)


_combine.defvjp(_forward, _backward)
