"""XLA's order of the collectives of unrolled units, which overlap with other units."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable

from fsdp_jax._scopes import units_in
from fsdp_jax.planner.liveness._late_products import with_late_products
from fsdp_jax.planner.liveness._lifetimes import (
    BARRIER,
    KERNELS,
    REDUCES,
    REDUCTIONS,
    VIEWS,
)
from fsdp_jax.planner.liveness._operations import Operation, Program

_CASTS = VIEWS | {"convert_element_type"}
_FIXED = KERNELS | REDUCTIONS | {BARRIER}


def overlapped(program: Program) -> Program:
    """Moves the collectives that `order_units` tied to where XLA's scheduler has them.

    | operation | runs | because |
    |---|---|---|
    | gather | as soon as what it waits for is there | it overlaps with a unit |
    | scaling of a gradient | as soon as the gradient is there | it is fused with it |
    | reduction | just before what waits for it | it overlaps with a unit |

    So the weights of the next unit and the unreduced gradients of the one before are in
    memory beside what a unit computes. Products that less depends on are late too, see
    `with_late_products`: not in loops, whose bodies XLA schedules by themselves.

    Args:
      program: Program; returned unchanged if it has no reductions behind barriers, or
        gathers fewer than two units.
    """
    links = _Links(program.operations)
    late = links.leading_to(
        filter(links.is_tied, links.named(REDUCES)), lambda name: name == BARRIER
    )
    early = links.leading_to(
        filter(links.is_tied, links.named({"all_gather"})), lambda name: name in _CASTS
    )
    gathers = early.intersection(links.named({"all_gather"}))
    scopes = (units_in(program.operations[i].scopes) for i in gathers)
    if not late or len({unit for units in scopes for unit in units}) < 2:
        return program
    scaled = links.leading_to(late, lambda name: name not in _FIXED) - late
    late |= links.made_of(late)
    order = _in_order(links, early | scaled, late)
    operations = with_late_products([program.operations[i] for i in order])
    return dataclasses.replace(program, operations=tuple(operations))


class _Links:
    """The operations of a program by number, with those that each of them reads.

    Attributes:
      reads: Numbers of the operations that make the operands of each.
      readers: Numbers of the operations that read the results of each.
    """

    def __init__(self, operations: tuple[Operation, ...]) -> None:
        self._names = [one.name for one in operations]
        makers = {value: i for i, one in enumerate(operations) for value in one.outputs}
        self.reads = [
            [makers[value] for value in dict.fromkeys(one.inputs) if value in makers]
            for one in operations
        ]
        self.readers: list[list[int]] = [[] for _ in operations]
        for i, read in enumerate(self.reads):
            for maker in read:
                self.readers[maker].append(i)

    def named(self, names: Collection[str]) -> list[int]:
        """Returns the operations of some names."""
        return [i for i, name in enumerate(self._names) if name in names]

    def is_tied(self, i: int) -> bool:
        """Returns whether an operation reads what is behind a barrier, or a cast of it.

        Args:
          i: Number of the operation.
        """
        return any(
            self._names[maker] == BARRIER
            or self._names[maker] in _CASTS
            and self.is_tied(maker)
            for maker in self.reads[i]
        )

    def leading_to(
        self, last: Iterable[int], passes: Callable[[str], bool]
    ) -> set[int]:
        """Returns `last`, and the operations that nothing else reads.

        Args:
          last: Numbers of operations.
          passes: Whether operations of a name may be among those found.
        """
        found = set(last)
        for i in reversed(range(len(self._names))):
            if i not in found and self.readers[i] and passes(self._names[i]):
                if found.issuperset(self.readers[i]):
                    found.add(i)
        return found

    def made_of(self, first: Collection[int]) -> set[int]:
        """Returns the elementwise operations on results of `first`, without barriers.

        Args:
          first: Numbers of operations.
        """
        found = set(first)
        for i, name in enumerate(self._names):
            if name not in _FIXED and not found.isdisjoint(self.reads[i]):
                found.add(i)
        return found - set(first)


def _in_order(links: _Links, early: set[int], late: set[int]) -> list[int]:
    """Returns the numbers of the operations in the order in which they run.

    Args:
      links: Operations.
      early: Operations that run as soon as their operands are there.
      late: Operations that run just before another operation reads their results.
    """
    done: dict[int, None] = {}

    def run(i: int) -> None:
        if i in done:
            return
        for maker in links.reads[i]:
            run(maker)
        done[i] = None
        for reader in links.readers[i]:
            if reader in early and all(maker in done for maker in links.reads[reader]):
                run(reader)

    for i in range(len(links.reads)):
        if i not in early and i not in late:
            run(i)
    for i in range(len(links.reads)):
        run(i)
    return list(done)
