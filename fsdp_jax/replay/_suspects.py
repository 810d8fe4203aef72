"""What a check reports, and the devices to which the events of a wrong step point.

A fault spreads with the next collective: after a reduction every device is wrong. So
the devices are those of the first event at which three runs differ. All that a rank had
received until then was right, so that what it computed wrong is its own fault. Ranks
are on other devices in each run: two of three results for a rank are right, and where a
device is always wrong it is the one that all wrong results have in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import UInt32

from fsdp_jax.replay._digest import DeviceDigests
from fsdp_jax.replay._events import Event, Events, Moment, in_order

Wrong = Literal["step", "replay", "state", "undecided"]


@dataclasses.dataclass(frozen=True)
class CorruptionReport:
    """What a check found.

    Attributes:
      step: Number of the step, `state.step` after it.
      leaves: Names of the leaves that are wrong.
      wrong: Computation that is wrong: "step", "replay", "state" if the state changed
        between two steps, or "undecided" if no two of three results are equal.
      devices: Devices that the values point to; () if they point to none.

    Examples:
      >>> report = fsdp.replay.CorruptionReport(7, ("params.w",), "step", ())
      >>> print(report)
      in step 7: the step; no single device; params.w
    """

    step: int
    leaves: tuple[str, ...]
    wrong: Wrong
    devices: tuple[Any, ...] = ()

    def __str__(self) -> str:
        """Returns a line that names step, computation, devices and leaves."""
        when = "before" if self.wrong == "state" else "in"
        what = self.wrong if self.wrong == "undecided" else f"the {self.wrong}"
        shown = ", ".join(map(str, self.devices)) or "no single device"
        more = f" and {len(self.leaves) - 5} more" if len(self.leaves) > 5 else ""
        leaves = ", ".join(self.leaves[:5]) + more
        return f"{when} step {self.step}: {what}; {shown}; {leaves}"


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What is known of one run of a step, for all devices.

    Attributes:
      mesh: Mesh of the run.
      given: Digests of the state that it got, computed before.
      events: Events of the run; the first is the state as the step read it.
      sums: Bits of loss and gradient norm, which devices compute together.
      made: Digests of the state that it made.
    """

    mesh: Mesh
    given: DeviceDigests
    events: Events
    sums: UInt32[np.ndarray, " sums"]
    made: DeviceDigests

    @property
    def misread(self) -> list[Any]:
        """Devices on which the step read other values than it was given."""
        read = self.events[0]
        assert isinstance(read, Event)
        differs = (np.asarray(read.digest) != self.given.values).any((1, 2))
        return list(self.mesh.devices.reshape(-1)[differs])


def suspect_devices(runs: Sequence[Recorded], *, is_exact: bool) -> tuple[Any, ...]:
    """Returns the devices that runs of one step point to; () if they point to none.

    First the devices whose stored values changed before the step read them, each of
    which is certain. Then those of the first event at which the runs differ, if what
    differs was computed there: a wrong result of a collective may come from any of its
    devices. Of a data rank whose tensor is split over `tp`, all devices are suspects.

    Args:
      runs: Three runs, with each rank on another device.
      is_exact: Whether sums have the same bits in all runs. If not, new states are not
        compared, and the first reduction is the last event that tells.
    """
    if misread := [device for run in runs for device in run.misread]:
        return tuple(dict.fromkeys(misread))
    meshes = [run.mesh for run in runs]
    if len({mesh.devices.shape for mesh in meshes}) > 1:
        return ()
    for moments in _moments(runs, is_exact=is_exact):
        digests = [moment.digest for moment in moments]
        if all(np.array_equal(digests[0], other) for other in digests[1:]):
            continue
        return _outvoted(meshes, digests) if moments[0].is_computed else ()
    return ()


def _moments(
    runs: Sequence[Recorded], *, is_exact: bool
) -> Iterator[tuple[Moment, ...]]:
    """Yields each event of all runs, and at the end the states that they made."""
    shapes = [jax.tree.map(np.shape, run.events) for run in runs]
    if any(other != shapes[0] for other in shapes[1:]):
        return
    yield from zip(*(in_order(run.events) for run in runs), strict=True)
    # A wrong norm may change the state of one device alone, and that by clipping.
    yield tuple(Moment(run.sums, False) for run in runs)
    if is_exact:
        yield tuple(Moment(run.made.values, True) for run in runs)


def _outvoted(
    meshes: Sequence[Mesh], digests: Sequence[UInt32[np.ndarray, "ranks ..."]]
) -> tuple[Any, ...]:
    """Returns the devices that all results without a majority have in common."""
    ranks = len(digests[0])
    results = np.stack([digest.reshape(ranks, -1) for digest in digests])
    found: list[Any] | None = None
    for rank in np.flatnonzero((results != results[0]).any((0, 2))):
        wrong = _minority(results[:, rank])
        if wrong is None:
            return ()
        devices = meshes[wrong].devices.reshape(ranks, -1)[rank]
        found = [d for d in devices if found is None or d in found]
    return tuple(found or ())


def _minority(results: UInt32[np.ndarray, "runs words"]) -> int | None:
    """Returns the one of three results that differs from two equal ones."""
    equal = (results[:, None] == results[None]).all(-1).sum(1)
    return int(equal.argmin()) if sorted(equal) == [1, 2, 2] else None
