"""What a unit saves for backward: policies of `jax.checkpoint`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax._scopes import FSDP_UNSHARD

Policy = Callable[..., bool]

_PASSING_ON = ("optimization_barrier", "stop_gradient")
_PARTS = ("real", "imag", "abs")
"""Primitives with real results of complex operands."""


@dataclasses.dataclass(frozen=True)
class Resharding:
    """The `jax.checkpoint` policy of a unit: everything but its gathered weights.

    Nor what is what an operation was given: `hold_gathers` puts a barrier before
    gathers, and a loop would save its shards for each iteration.

    Attributes:
      policy: Policy for everything else, see `reshard_after_forward`.
    """

    policy: Policy | None

    def __call__(self, primitive: Any, *args: Any, **params: Any) -> bool:
        """Returns whether the results of a primitive are saved."""
        if _is_unshard(primitive, params) or primitive.name in _PASSING_ON:
            return False
        return savable(self.policy)(primitive, *args, **params)


def savable(policy: Policy | None) -> Policy:
    """Wraps a policy such that nothing is saved that `jax.checkpoint` cannot save.

    It rounds what it saves with `reduce_precision`, which refuses complex numbers, and
    takes the range of a float of 8 bits or less for that of an IEEE format: the largest
    float8_e4m3fn is then 240 and not 448 (jax 0.10.2), and larger values become NaN.
    Both are computed again: a cast, or what a few real numbers make.

    Args:
      policy: `jax.checkpoint` policy for all other arrays; None saves them.
    """

    def save(primitive, *args, **params) -> bool:
        if _makes_unsavable(primitive.name, args, params):
            return False
        return policy is None or policy(primitive, *args, **params)

    return save


def _makes_unsavable(name: str, args, params) -> bool:
    """Guesses from a policy's arguments whether a primitive has such results."""
    if called := params.get("call_jaxpr"):
        return any(map(_is_unsavable, called.out_avals))
    if name == "complex":
        return True
    if name == "fft":
        return params["fft_type"] != jax.lax.FftType.IRFFT
    if name in _PARTS:
        return any(map(is_float8, args))
    dtype = params.get("new_dtype", params.get("preferred_element_type"))
    if dtype is not None:
        return _is_narrow(dtype) or jnp.issubdtype(dtype, jnp.complexfloating)
    # A policy is not told the dtype of the results: assume that of the operands.
    return any(map(_is_unsavable, args))


def _is_unsavable(array: Any) -> bool:
    dtype = getattr(array, "dtype", jnp.float32)
    return _is_narrow(dtype) or jnp.issubdtype(dtype, jnp.complexfloating)


def is_float8(array: Any) -> bool:
    """Returns whether an array is floating point of 8 bits or less; may be abstract."""
    return _is_narrow(getattr(array, "dtype", jnp.float32))


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8


def _is_unshard(primitive, params) -> bool:
    if primitive.name != "custom_vjp_call":
        return False
    # By name, since the equation does not hold the Python function.
    return params["call_jaxpr"].jaxpr.debug_info.func_name == FSDP_UNSHARD
