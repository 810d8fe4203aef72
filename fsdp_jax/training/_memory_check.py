"""Steps that nearly do not fit: said before they fail, or grow slow."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax

from fsdp_jax._report import format_bytes
from fsdp_jax._tree import PyTree

NEARLY_FULL = 0.95
"""The part of a device's memory from which on a step is said to be near its end."""

_FIX = (
    "Take fewer rows a microbatch (accumulate=...), save less for backward "
    "(remat_policy of FSDPConfig), shard further, or offload (offload of FSDPConfig)"
)


class MemoryWarning(UserWarning):
    """A compiled step takes nearly all of the device's memory, or XLA made it fit.

    The numbers are right in both cases. What fails is the next longer row, the next
    version of XLA or a second program beside it; and what XLA recomputes of itself is
    chosen without knowing what is cheap to recompute.
    """


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes on a device at the fullest moment: what XLA assigned buffers to."""
    stats = compiled.memory_analysis()
    assert stats is not None
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )


def memory_alarms(compiled: jax.stages.Compiled, limit: int) -> tuple[str, ...]:
    """What is to be said of a compiled program's memory; empty if all is well.

    Args:
      compiled: The program.
      limit: Bytes that a device has for it.
    """
    alarms = []
    size = compiled_bytes(compiled)
    if size >= NEARLY_FULL * limit:
        alarms.append(
            f"the step takes {format_bytes(size)} a device at its fullest moment, "
            f"{size / limit:.1%} of the {format_bytes(limit)} that there are. {_FIX}."
        )
    if count := num_rematerialized(compiled.as_text() or ""):
        alarms.append(
            f"XLA recomputes {count} value(s) that the program keeps, since they would "
            f"not fit into {format_bytes(limit)} a device: the step is slower than it "
            f"need be. {_FIX}."
        )
    return tuple(alarms)


def num_rematerialized(text: str) -> int:
    """Instructions of a module that XLA's own rematerialization has copied.

    It marks the names of its copies; what `jax.checkpoint` recomputes has no such mark.
    """
    return len(re.findall(r"^\s*(?:ROOT )?%?[\w.\-]*\.remat[\w.\-]* = ", text, re.M))


class MemoryWatch:
    """Looks at each program of a step once, before it first runs.

    Attributes:
      limit: Bytes that a device has; None for as many as the backend says, of which
        that for CPUs says nothing, and then nothing is looked at.
    """

    def __init__(self, limit: int | None = None):
        if limit is not None and limit < 1:
            raise ValueError(f"memory_limit={limit}: a device has at least 1 byte.")
        self.limit = limit
        self._seen: set[Any] = set()

    def look(self, jitted: Any, state: PyTree, batch: PyTree) -> None:
        """Warns with a `MemoryWarning` for each alarm of the program that will run."""
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch))
        if shapes in self._seen:
            return
        self._seen.add(shapes)
        limit = self.limit or _limit_of(jax.tree.leaves(state)[0])
        if limit is None:
            return
        # The call that follows takes this very program: it is compiled once.
        for alarm in memory_alarms(jitted.lower(state, batch).compile(), limit):
            warnings.warn(MemoryWarning(alarm), stacklevel=3)


def _limit_of(array: jax.Array) -> int | None:
    device = min(array.sharding.addressable_devices, key=lambda device: device.id)
    return (device.memory_stats() or {}).get("bytes_limit")
