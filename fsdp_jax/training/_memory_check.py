"""Warnings about compiled steps that nearly exceed device memory."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax

from fsdp_jax._report import format_bytes
from fsdp_jax._tree import PyTree

NEARLY_FULL = 0.95
"""Fraction of device memory at or above which a step is reported as nearly full."""

_FIX = (
    "Take fewer rows a microbatch (num_microbatches=...), save less for backward "
    "(remat_policy of FSDPConfig), shard further, or offload (offload of FSDPConfig)"
)


class MemoryWarning(UserWarning):
    """A compiled step nearly fills device memory, or XLA rematerialized to fit it.

    The results are correct in both cases. A longer row, another version of XLA or a
    second program on the device may run out of memory; and XLA chooses what it
    recomputes without knowing what is cheap to recompute.
    """


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the peak bytes per device in a program's buffer assignment."""
    stats = compiled.memory_analysis()
    assert stats is not None
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )


def memory_alarms(compiled: jax.stages.Compiled, limit: int) -> tuple[str, ...]:
    """Returns warnings about a compiled program's memory; empty if there are none.

    Args:
      compiled: Compiled program.
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
    """Counts the HLO instructions that XLA's own rematerialization pass duplicated.

    XLA appends `.remat` to the names of these copies; what `jax.checkpoint` recomputes
    has no such suffix. Constants that another pass of XLA makes where they are used, so
    as not to keep them, end in `.rematerialized` (jaxlib 0.12) and cost nothing.
    """
    copies = r"^\s*(?:ROOT )?%?[\w.\-]*\.remat(?!erialized)[\w.\-]* = "
    return len(re.findall(copies, text, re.M))


class MemoryWatch:
    """Memory check of each program of a step, once, before it first runs.

    Attributes:
      limit: Bytes of a device; None for the limit that the backend reports. The CPU
        backend reports none, and then nothing is checked.
    """

    def __init__(self, limit: int | None = None):
        if limit is not None and limit < 1:
            raise ValueError(f"memory_limit={limit}: a device has at least 1 byte.")
        self.limit = limit
        self._seen: set[Any] = set()

    def look(self, jitted: Any, state: PyTree, batch: PyTree) -> None:
        """Emits a `MemoryWarning` for each alarm of the program about to run."""
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch))
        if shapes in self._seen:
            return
        self._seen.add(shapes)
        limit = self.limit or _limit_of(jax.tree.leaves(state)[0])
        if limit is None:
            return
        # The call that follows reuses this executable: it is compiled only once.
        for alarm in memory_alarms(jitted.lower(state, batch).compile(), limit):
            warnings.warn(MemoryWarning(alarm), stacklevel=3)


def _limit_of(array: jax.Array) -> int | None:
    device = min(array.sharding.addressable_devices, key=lambda device: device.id)
    return (device.memory_stats() or {}).get("bytes_limit")
