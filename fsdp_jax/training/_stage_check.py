"""Refuses compiled steps in which a pipeline stage would wait for another for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from fsdp_jax._scopes import is_of_optimizer
from fsdp_jax.hlo._program import CommunicatedArray, communicated_arrays, program_of
from fsdp_jax.sharding._plan import Plan

ALIGNED = (
    "Give each part that is cut out of a dim over tp a weight of its own, or make the "
    "dim whole before it is cut: jax.lax.with_sharding_constraint(x, "
    "jax.sharding.PartitionSpec())"
)
"""What to do where XLA sends parts of a dim that is split over tp."""
_OF_ROWS = (
    "Send by an all-gather or all-to-all among the devices of a stage; of rows over "
    "cp, by all_gather_attention or ulysses_attention"
)


def remedy(one: CommunicatedArray) -> str:
    """Returns what to do about an array that `stalling` yields.

    Args:
      one: The array.
    """
    return ALIGNED if one.axes == ("tp",) else _OF_ROWS


def stalling(arrays: Iterable[CommunicatedArray]) -> Iterator[CommunicatedArray]:
    """Yields what is sent among all devices in a branch that one stage takes.

    A collective among the devices of one stage is safe there. But a collective-permute
    has no replica groups in XLA: all devices of the mesh must run it, or none.

    Args:
      arrays: Arrays that a step of several stages communicates.
    """
    for one in arrays:
        is_of_all = one.op == "collective-permute" or "pp" in (one.axes or ())
        if one.is_in_branch and is_of_all and not is_of_optimizer(one.scope):
            yield one


class StageWatch:
    """Check of each program of a plan with stages, once, before it first runs.

    Args:
      plan: Plan of the programs.
    """

    def __init__(self, plan: Plan):
        self._mesh = plan.mesh
        self._seen: set[Any] = set()

    def look(self, jitted: Any, *args: Any) -> None:
        """Compiles a program that is about to run, and looks at what it sends.

        Args:
          jitted: Function of `jax.jit`.
          *args: What it is called with.

        Raises:
          ValueError: If a stage would wait in it for another one that never comes.
        """
        if self._mesh.shape["pp"] == 1:
            return
        leaves, treedef = jax.tree.flatten(args)
        shapes = treedef, tuple((x.shape, x.dtype) for x in leaves)
        if shapes in self._seen:
            return
        # The call that follows reuses this executable: it is compiled only once.
        program = program_of(jitted.lower(*args).compile(), self._mesh)
        found = list(stalling(communicated_arrays(program, self._mesh)))
        if found:
            lines = [
                f"{one.op} of {_where(one)} over "
                f"{' x '.join(one.axes or ()) or 'no axis of the mesh'}"
                for one in found
            ]
            raise ValueError(
                "The step does not run with pp: a stage in its turn would wait for "
                "devices of other stages, which have none.\n"
                + "\n".join(f"- {line}" for line in dict.fromkeys(lines))
                + "".join(f"\n{fix}." for fix in dict.fromkeys(map(remedy, found)))
            )
        self._seen.add(shapes)


def _where(one: CommunicatedArray) -> str:
    return f"{one.dtype}{list(one.sent)} in {one.scope.strip('/') or 'no scope'}"
