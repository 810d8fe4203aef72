"""What a unit saves for backward: policies of `jax.checkpoint`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from fsdp_jax._scopes import FSDP_UNSHARD

Policy = Callable[..., bool]

_PASSING_ON = ("optimization_barrier", "stop_gradient")


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
        return without_float8(self.policy)(primitive, *args, **params)


def without_float8(policy: Policy | None) -> Policy:
    """Wraps a policy such that no floating-point array of 8 bits or less is saved.

    `jax.checkpoint` rounds what it saves with `reduce_precision`, which takes the range
    of such a dtype for that of an IEEE format: the largest float8_e4m3fn is then 240
    and not 448 (jax 0.10.2), and larger values become NaN. Casting again is cheap.

    Args:
      policy: `jax.checkpoint` policy for all other arrays; None saves them.
    """

    def save(primitive, *args, **params) -> bool:
        if _makes_float8(args, params):
            return False
        return policy is None or policy(primitive, *args, **params)

    return save


def _makes_float8(args, params) -> bool:
    """Guesses from a policy's arguments whether a primitive has float8 results."""
    if called := params.get("call_jaxpr"):
        return any(is_float8(aval) for aval in called.out_avals)
    dtype = params.get("new_dtype", params.get("preferred_element_type"))
    if dtype is not None:
        return _is_narrow(dtype)
    # A policy is not told the dtype of the results: assume that of the operands.
    return any(is_float8(arg) for arg in args)


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
