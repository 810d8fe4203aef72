"""A loop over a stack of units, replaced by one that gathers ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fsdp_jax._scopes import unit_scope
from fsdp_jax.step._flat_trace import has_effects
from fsdp_jax.step._float_partition import FloatPartition
from fsdp_jax.step._lifted_gathers import LiftedGathers, NotLiftedError, lift_gathers
from fsdp_jax.step._loop_equation import Loop
from fsdp_jax.step._prefetch import run_stack
from fsdp_jax.step._prefetch_stack import Stack
from fsdp_jax.step._shard import Shard
from fsdp_jax.step._sliced_shards import Leaf, SlicedShards
from fsdp_jax.step._static_runs import StaticRun


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a program runs: within a loop, and as the last one that runs units."""

    is_nested: bool = False
    is_last: bool = True


def stack_loop(
    loop: Loop,
    shards: Sequence[Shard],
    leaves: Sequence[Leaf | None],
    prefetch: int,
    place: Place,
) -> Callable[..., Sequence[Any]] | None:
    """Returns a function of a loop's operands that prefetches; None if none has to.

    Args:
      loop: Loop that slices shards.
      shards: Shards of all parameters.
      leaves: For each array that it slices, the leaf of a shard that it is.
      prefetch: Number of iterations whose weights are gathered ahead.
      place: Where the loop runs.

    Raises:
      NotLiftedError: If the loop's gathers cannot be taken out of its body.
    """
    first = loop.num_consts + loop.num_carry
    is_shard = [False] * first + [leaf is not None for leaf in leaves]
    lifted = lift_gathers(loop.eqn.params["jaxpr"], is_shard)
    if lifted is None or not loop.eqn.params["length"]:
        return None
    if loop.eqn.params["reverse"]:
        raise NotLiftedError("it begins with the last unit (reverse=True)")
    if has_effects(loop.eqn):
        # jax has no custom derivatives of functions with effects.
        raise NotLiftedError("it has side effects, such as jax.debug.print")
    if any(at is not None for at in lifted.passed[: loop.num_carry]):
        raise NotLiftedError("it carries a shard from one unit to the next")
    sliced = SlicedShards.of(shards, leaves, lifted)
    stack = dataclasses.replace(
        _stack(loop, lifted, sliced, prefetch),
        is_nested=place.is_nested,
        keeps_window=place.is_last,
    )

    def run(*operands):
        consts, carry, xs = loop.split(operands)
        own, slices = sliced.shards(xs), [xs[at] for at in sliced.others]
        with unit_scope(own[0].param.unit):
            carry, ys = run_stack(stack, own, (carry, slices, consts))
        made, stacks = iter([*carry, *ys]), sliced.stacks(xs)
        return [next(made) if at is None else stacks[at] for at in lifted.passed]

    return run


def _stack(
    loop: Loop, lifted: LiftedGathers, sliced: SlicedShards, prefetch: int
) -> Stack:
    consts, carry, xs = loop.split([v.aval for v in loop.eqn.invars])
    slices = [xs[at] for at in sliced.others]
    num_ys = lifted.passed[len(carry) :].count(None)

    def weights_only(shards):
        leaves = jax.tree.leaves(shards)
        return lifted.gather(*(leaves[at] for at in sliced.read))

    def rest(values, *leaves):
        given = iter(leaves)
        carried, sliced, constant = (
            [next(given) for _ in part] for part in (carry, slices, consts)
        )
        return lifted.rest(*values, *constant, *carried, *sliced)

    return Stack(
        weights_only,
        {None: rest},
        jax.tree.structure(([0] * len(carry), [0] * num_ys)),
        FloatPartition.of(carry, slices, consts),
        [StaticRun(None, 0, loop.eqn.params["length"])],
        prefetch,
        loop.eqn.params["unroll"],
        policy=None,  # The unit's own is in the trace.
    )
