"""Finds more unsharded units at a time than the plan says, and merged gathers."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping, Sequence

from fsdp_jax.audit._check_collectives import Key, key_of
from fsdp_jax.audit._expected import ExpectedCollective
from fsdp_jax.audit._mismatch import Difference
from fsdp_jax.audit._unsharded_units import (
    Sizes,
    sizes_of,
    units_an_iteration,
    unsharded,
)
from fsdp_jax.hlo._program import CommunicatedArray, Program
from fsdp_jax.sharding._plan import Plan

MERGED_FIX = (
    "FSDPConfig(prefetch=1) in the plan that the step was made with, and its compiler "
    "options, which make_train_step passes by default"
)
MANY_FIX = (
    "make the step with this plan and its compiler options, which make_train_step "
    "passes by default, and give fsdp.scan no larger prefetch="
)


def too_many(
    plan: Plan,
    program: Program,
    arrays: Sequence[CommunicatedArray],
    expected: Sequence[ExpectedCollective],
) -> Iterator[Difference]:
    """Yields a difference if more units are unsharded at once than the plan allows.

    Without prefetch the order is XLA's, and the plan states no number.
    """
    if not plan.prefetch:
        return
    found = unsharded(program, arrays, expected)
    most = _most(plan, units_an_iteration(arrays, expected))
    if found.units > most:
        others = f" and {len(found.names) - 3} more" if len(found.names) > 3 else ""
        yield Difference(
            f"units {', '.join(map(repr, found.names[:3]))}{others}",
            f"at most {most} are unsharded at once (prefetch={plan.prefetch})",
            f"has {found.units} unsharded at once, at {found.instruction}",
            MANY_FIX,
        )


def merged(
    arrays: Sequence[CommunicatedArray], expected: Sequence[ExpectedCollective]
) -> Iterator[Difference]:
    """Yields gathers that hold the weights of more units than one.

    The first of these units waits for the weights of all.
    """
    sizes = sizes_of(expected)
    if not sizes:  # No unit is gathered on its own: ZeRO-0 to ZeRO-2, or no units.
        return
    by_instruction: dict[str, list[CommunicatedArray]] = {}
    for one in arrays:
        if one.op == "all-gather":
            by_instruction.setdefault(one.instruction.name, []).append(one)
    for name, found in by_instruction.items():
        keys = collections.Counter(map(key_of, found))
        if (units := _fewest(keys, sizes)) > 1:
            yield Difference(
                f"{name}, of {len(found)} arrays",
                "each unit has gathers of its own",
                f"gathers {units} units or more together",
                MERGED_FIX,
            )


def _most(plan: Plan, an_iteration: int) -> int:
    """Returns the number of units that may be unsharded at once.

    Args:
      plan: Plan.
      an_iteration: Number of units in one iteration of a loop, which count as one.
    """
    units = plan.units
    within = [sum(one.startswith(f"{outer}.") for outer in units) for one in units]
    has_loop = any(param.num_stacked for param in plan.param_plans)
    # A unit within others runs while these are unsharded. XLA copies one of several
    # that a loop carries. The unit before a loop, or behind it in backward, is
    # unsharded while the first units of the loop are gathered.
    more = max(within, default=0) + (plan.prefetch > 1)
    more += has_loop and len(units) > 1
    return (plan.prefetch + 1) * an_iteration + more


def _fewest(keys: Mapping[Key, int], sizes: Sizes) -> int:
    """Returns the smallest number of units that have arrays of these forms together."""
    most = {key: max(own.get(key, 0) for own in sizes.values()) for key in keys}
    wanted = {key: number for key, number in keys.items() if most[key]}
    for own in sizes.values():
        if all(number <= own.get(key, 0) for key, number in wanted.items()):
            return 1
    return max(2, *(math.ceil(number / most[key]) for key, number in wanted.items()))
