"""What a check reports, and the devices that a wrong step points to."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._leaf_names import flatten
from fsdp_jax.sharding._mesh import AXES, BATCH_AXES

# A flipped bit of a stored value stays in it, beside an update of ordinary size; what
# reaches a value through a gradient is an update too. One that is larger than every
# right update by this factor is therefore of the value itself.
_BEYOND_UPDATES = 4.0
# A weight with a low bit flipped changes the loss of all ranks, and rounding hides it
# in those of some: what one rank alone has must be more than that.
_ROUNDINGS = 16


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


def suspect_devices(
    old: PyTree,
    wrong: PyTree,
    right: PyTree,
    mesh: Mesh,
    losses: tuple[np.ndarray | None, np.ndarray | None],
) -> tuple[Any, ...]:
    """Returns the devices that a wrong state points to.

    In this order: the only device whose shards differ; the only device with a value
    that no update explains; the only rank whose loss differs, by more than rounding.
    A weight that one rank alone reads, such as the row of a rare token, may then point
    to this rank and not to the device that stores it.

    Args:
      old: State before the step, on the mesh of the wrong one.
      wrong: State after it.
      right: State after it by the two equal results, on the same mesh.
      mesh: Mesh of the step that is wrong.
      losses: Loss of each data rank in the wrong step and in a right one; None if they
        were not recorded.
    """
    differ = _largest_differences(wrong, right)
    owners = [device for device, sizes in differ.items() if any(sizes.values())]
    if len(owners) == 1:
        return tuple(owners)
    updates = _largest_updates(old, right)
    beyond = [
        device
        for device in owners
        if any(
            size > _BEYOND_UPDATES * updates[name]
            for name, size in differ[device].items()
        )
    ]
    if beyond:
        return tuple(beyond) if len(beyond) == 1 else ()
    return _of_losses(mesh, *losses)


def _of_losses(
    mesh: Mesh, wrong: np.ndarray | None, right: np.ndarray | None
) -> tuple[Any, ...]:
    """Returns the devices of the only data rank whose loss differs; () for others."""
    if wrong is None or right is None or len(wrong) < 2:
        return ()
    differs = wrong.view(np.uint32) != right.view(np.uint32)
    clearly = ~(np.abs(wrong - right) <= _ROUNDINGS * np.spacing(np.abs(right)))
    if differs.sum() != 1 or clearly.sum() != 1:
        return ()
    # A rank of data is all devices at its place on the batch axes.
    order = [AXES.index(axis) for axis in BATCH_AXES]
    others = [i for i in range(len(AXES)) if i not in order]
    by_rank = mesh.devices.transpose(*order, *others).reshape(len(wrong), -1)
    return tuple(by_rank[differs].reshape(-1))


def _largest_differences(a: PyTree, b: PyTree) -> dict[Any, dict[str, float]]:
    """Returns the largest difference in each device's shard, by device and leaf."""
    found: dict[Any, dict[str, float]] = {}
    for name, x, y in _pairs(a, b):
        others = {shard.device: shard.data for shard in y.addressable_shards}
        for shard in x.addressable_shards:
            size = _distance(np.asarray(shard.data), np.asarray(others[shard.device]))
            found.setdefault(shard.device, {})[name] = size
    return found


def _largest_updates(old: PyTree, new: PyTree) -> dict[str, float]:
    return {
        name: max(
            _distance(np.asarray(s.data), np.asarray(t.data))
            for s, t in zip(x.addressable_shards, y.addressable_shards, strict=True)
        )
        for name, x, y in _pairs(old, new)
    }


def _pairs(a: PyTree, b: PyTree) -> list[tuple[str, jax.Array, jax.Array]]:
    left, right = flatten(a), flatten(b)
    return [(n, leaf.value, right[n].value) for n, leaf in left.items()]


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest difference; infinite where only one is finite."""
    if a.tobytes() == b.tobytes():
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
    size = float(np.where(np.isnan(distance), np.inf, distance).max())
    return size or float(np.finfo(np.float64).tiny)  # Zeros of two signs.
