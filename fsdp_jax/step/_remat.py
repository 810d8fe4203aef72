"""Reshard after forward: weights are freed, and gathered again for backward.

To exclude only the gathered value from what a `jax.checkpoint` policy saves is not
enough: the policy then saves what is derived from it, a transpose, a cast, a slice,
which is as large. Instead everything in a unit that depends on its weights alone moves,
together with the gather, into one custom-derivative function whose outputs are never
saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

from fsdp_jax._scopes import FSDP_UNSHARD, traced_as
from fsdp_jax.step._gathered import Gathered
from fsdp_jax.step._remat_policy import Policy, Resharding, is_float8
from fsdp_jax.step._split_unit import split_unit


def reshard_after_forward(
    compute: Callable[..., Any],
    unshard: Callable[[Any], Sequence[Array | Gathered]],
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
      argument is in float8, see `savable`.
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


def _float8_argument(args) -> str:
    shapes = [
        f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(args) if is_float8(x)
    ]
    return (
        f"A unit is given {', '.join(shapes)} as an argument. It would be saved for "
        "backward, where jax.checkpoint makes NaN of float8_e4m3fn above 240. Cast to "
        "float8 inside the unit, or set FSDPConfig(reshard_after_forward=False)."
    )
