"""Reshard after forward: weights are freed, and gathered again for backward.

To exclude only the gathered value from what a `jax.checkpoint` policy saves is not
enough: the policy then saves what is derived from it, a transpose, a cast, a slice,
which is as large. Instead everything in a unit that depends on its weights alone moves,
together with the gather, into one custom-derivative function whose outputs are never
saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fsdp_jax._scopes import FSDP_UNSHARD, traced_as
from fsdp_jax.step._split_unit import split_unit

Policy = Callable[..., bool]


def reshard_after_forward(
    compute: Callable[..., Any],
    unshard: Callable[[Any], Sequence[Array]],
    policy: Policy | None = None,
) -> Callable[..., Any]:
    """Makes a unit whose backward gathers its weights again.

    Args:
      compute: `compute(weights, *args)`, on the unsharded weights.
      unshard: `unshard(shards) -> weights`; only the shards are kept for backward.
      policy: `jax.checkpoint` policy for everything else the unit computes; None saves
        all of it.

    Returns:
      `unit(shards, *args)`, equal to `compute(unshard(shards), *args)`. Values derived
      from weights inside a loop or a custom-derivative function of `compute` are not
      recognised and are saved as `policy` decides. `unit` raises `ValueError` if an
      argument is in float8, see `without_float8`.
    """

    def unit(shards, *args):
        if any(map(is_float8, jax.tree.leaves(args))):
            raise ValueError(_float8_argument(args))
        weights_only, rest, out_tree = split_unit(compute, unshard, shards, args)

        @jax.custom_vjp
        @traced_as(FSDP_UNSHARD)
        def fsdp_unshard(shards):
            return weights_only(shards)

        def cotangents(shards, grads):
            found = jax.vjp(weights_only, shards)[1](grads)
            return jax.tree.map(_in_same_memory, (shards,), found)

        # The forward rule calls `fsdp_unshard` itself, so that the trace has one
        # equation that `save` can refuse. Of any other function the policy would see
        # the equations within, and save their results.
        fsdp_unshard.defvjp(
            lambda shards: (fsdp_unshard(shards), shards),
            cotangents,
        )
        return out_tree.unflatten(rest(fsdp_unshard(shards), *jax.tree.leaves(args)))

    return jax.checkpoint(unit, policy=Resharding(policy))


def _in_same_memory(leaf: Array, cotangent: Array) -> Array | None:
    """Returns a cotangent; None if its array is on the host and it is not.

    jax makes zeros on the device for an array on the host, and then refuses them.
    """
    host = jax.memory.Space.Host
    if jax.typeof(leaf).memory_space != host:
        return cotangent
    is_array = cotangent.dtype != jax.dtypes.float0
    return (
        cotangent if is_array and jax.typeof(cotangent).memory_space == host else None
    )


@dataclasses.dataclass(frozen=True)
class Resharding:
    """The `jax.checkpoint` policy of a unit: everything but its gathered weights.

    Attributes:
      policy: Policy for everything else, see `reshard_after_forward`.
    """

    policy: Policy | None

    def __call__(self, primitive: Any, *args: Any, **params: Any) -> bool:
        """Returns whether the results of a primitive are saved."""
        saves = without_float8(self.policy)
        return not _is_unshard(primitive, params) and saves(primitive, *args, **params)


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


def _float8_argument(args) -> str:
    shapes = [
        f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(args) if is_float8(x)
    ]
    return (
        f"A unit is given {', '.join(shapes)} as an argument. It would be saved for "
        "backward, where jax.checkpoint makes NaN of float8_e4m3fn above 240. Cast to "
        "float8 inside the unit, or set FSDPConfig(reshard_after_forward=False)."
    )


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
