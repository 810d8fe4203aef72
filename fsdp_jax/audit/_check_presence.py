"""Checks that a program runs the plan's collectives at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fsdp_jax.audit._check_collectives import matches, may_be_merged
from fsdp_jax.audit._check_placement import returned_params
from fsdp_jax.audit._expected import ExpectedCollective
from fsdp_jax.audit._mismatch import Difference, named, over
from fsdp_jax.hlo._program import CommunicatedArray, Program
from fsdp_jax.sharding._plan import Plan

_REDUCTIONS = ("reduce", "deferred")
_GATHERS = ("gather", "enter")


def check_presence(
    plan: Plan,
    program: Program,
    arrays: Sequence[CommunicatedArray],
    expected: Sequence[ExpectedCollective],
) -> Iterator[Difference]:
    """Yields a difference if no collective of the plan runs, or no reduction.

    Not one by one: a unit whose weights no output depends on runs none. In a program
    compiled for GPUs any all-reduce of a vector may be one of gradients.

    Args:
      plan: Plan of the program.
      program: Program.
      arrays: Its communicated arrays.
      expected: Collectives of the plan.
    """
    ran = {
        planned.kind
        for one in arrays
        # Scalars cannot be told from the loss and the gradient norm.
        if one.elements > 1
        for planned in matches(one, expected)
    }
    if any(may_be_merged(program, one) and one.elements > 1 for one in arrays):
        ran.update(_REDUCTIONS)  # Gradients may be among what XLA has concatenated.
    reductions = [
        planned
        for planned in expected
        if planned.kind in _REDUCTIONS and math.prod(planned.sent) > 1
    ]
    updated = returned_params(plan, program)
    # A forward or an evaluation gathers, and reduces nothing.
    gathers = [planned for planned in expected if planned.kind in _GATHERS]
    needed = [*gathers, *(reductions if updated else ())]
    if needed and not ran:
        yield Difference(
            named([planned.param for planned in needed]),
            _kinds(needed),
            "has none of them",
            "audit the step that make_train_step made with this plan; compile one of "
            "your own that is partitioned by shardings alone, which lowered has no "
            "collectives yet",
        )
    elif reductions and updated and ran.isdisjoint(_REDUCTIONS):
        yield Difference(
            named([planned.param for planned in reductions]),
            _kinds(reductions),
            "returns the parameters without one of them: each rank would update its "
            "own",
            "let make_train_step compute the gradients, or return them from a "
            "shard_map by the specs of the plan",
        )


def _kinds(expected: Sequence[ExpectedCollective]) -> str:
    """Formats collectives by opcode and axes, e.g. "all-gathers over dp_shard"."""
    return ", ".join(
        dict.fromkeys(f"{planned.op}s {over(planned.axes)}" for planned in expected)
    )
