"""Reads a profile of a real run: the seconds of a step on a GPU, by unit.

jax writes an xplane file a host. XLA annotates each kernel with the instruction that it
is of (`hlo_op`), its module, and the scopes of jax (`name`), in which units are.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from fsdp_jax._scopes import unit_of
from fsdp_jax.hlo._collectives import OPS
from fsdp_jax.planner._unit_times import (
    COMPUTE,
    NO_UNIT,
    OPTIMIZER,
    UnitTime,
    summed,
)

UNKNOWN = "?"
"""Unit of kernels that say nothing of themselves, such as those of a CUDA graph."""

_SCOPES = ("name", "tf_op", "long_name")
"""Statistics of a kernel that may have its scopes; XLA:GPU writes the first."""

_NCCL = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "broadcast": "collective-broadcast",
    "sendrecv": "collective-permute",
}
"""Opcodes by what is in the name of NCCL's kernel."""

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a profile.

    Attributes:
      start: Second at which it began.
      end: Second at which it ended.
      module: Name of its HLO module; "" if it says none.
      instruction: Name of its HLO instruction; "" if it says none.
      unit: Path of the unit, "optimizer", "-" for none, "?" if it does not say.
      work: "compute", or the opcode of a collective.
    """

    start: float
    end: float
    module: str
    instruction: str
    unit: str
    work: str


@dataclasses.dataclass(frozen=True)
class ProfiledStep:
    """Mean step of a profile on one device.

    Attributes:
      device: Name of the device in the profile.
      module: Program whose steps these are, the one that took most of the time.
      steps: Number of steps in the profile.
      seconds: Seconds from the first kernel to the last one, by steps.
      times: Seconds of a step by unit and kind of work.
      others: Seconds of other programs, all together.
    """

    device: str
    module: str
    steps: int
    seconds: float
    times: tuple[UnitTime, ...]
    others: float


def read_profile(
    path: str | Path, *, device: int = 0, steps: int | None = None
) -> ProfiledStep:
    """Reads a profile that `jax.profiler.trace` or `fsdp-jax train --profile` wrote.

    Args:
      path: An `.xplane.pb` file, or the directory of the trace; the newest run counts.
      device: Number of the GPU among all of the profile.
      steps: Number of steps in the profile; None to count how often an instruction
        outside of all loops ran.

    Returns:
      The mean step.

    Raises:
      ValueError: If there is no profile, no such device, or no kernel in it.
    """
    planes = [plane for file in _files(Path(path)) for plane in _gpus(file)]
    if not 0 <= device < len(planes):
        raise ValueError(
            f"'{path}' has kernels of {len(planes)} GPU(s), and device {device} is "
            "none of them. Profile a run on GPUs, and choose one of them."
        )
    with warnings.catch_warnings():
        # jax 0.12's reader of an event's values is a type without a module, of which
        # Python 3.12 warns; where warnings are errors, that ends the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        found = list(_kernels(planes[device]))
    kernels = sorted(found, key=lambda kernel: kernel.start)
    if not kernels:
        raise ValueError(
            f"'{path}' has no kernel of {planes[device].name}: nothing ran while it "
            "was profiled."
        )
    return _step(planes[device].name, kernels, steps)


def _files(path: Path) -> Sequence[Path]:
    """Returns the files of the newest run below a directory, one a host."""
    if path.is_file():
        return [path]
    found = sorted(path.rglob("*.xplane.pb"))
    if not found:
        raise ValueError(
            f"'{path}' has no profile: no file below it is named *.xplane.pb."
        )
    newest = max(found, key=lambda file: file.stat().st_mtime).parent
    return [file for file in found if file.parent == newest]


def _gpus(file: Path) -> Iterator[Any]:
    try:
        data = ProfileData.from_serialized_xspace(file.read_bytes())
        planes = list(data.planes)
    except RuntimeError as error:
        raise ValueError(f"'{file}' is not a profile of jax: {error}") from error
    gpus = (plane for plane in planes if plane.name.startswith("/device:GPU"))
    yield from sorted(gpus, key=lambda plane: plane.name)


def _kernels(plane: Any) -> Iterator[Kernel]:
    """Yields the kernels of a device's streams; other lines repeat them."""
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                yield _kernel(event)


def _kernel(event: Any) -> Kernel:
    said = {name: value for name, value in event.stats if isinstance(value, str)}
    instruction = said.get("hlo_op", "")
    return Kernel(
        start=event.start_ns * 1e-9,
        end=event.end_ns * 1e-9,
        module=said.get("hlo_module", ""),
        instruction=instruction,
        unit=_unit(said),
        work=_work(event.name, instruction),
    )


def _unit(said: dict[str, str]) -> str:
    scopes = [said[name] for name in _SCOPES if name in said]
    for scope in scopes:
        if unit := unit_of(scope):
            return unit
    if any("optimizer" in scope for scope in scopes):
        return OPTIMIZER
    return NO_UNIT if "hlo_op" in said else UNKNOWN


def _work(name: str, instruction: str) -> str:
    if "nccl" not in name.lower():
        return COMPUTE
    if op := re.match("|".join(sorted(OPS, key=len, reverse=True)), instruction):
        return op[0]
    plain = name.lower().replace("_", "")
    return next((op for part, op in _NCCL.items() if part in plain), "collective")


def _step(device: str, kernels: Sequence[Kernel], steps: int | None) -> ProfiledStep:
    spent: dict[str, float] = {}
    for kernel in kernels:
        seconds = kernel.end - kernel.start
        spent[kernel.module] = spent.get(kernel.module, 0.0) + seconds
    module = max(filter(None, spent), key=lambda name: spent[name], default="")
    # A kernel of a CUDA graph names no module: it counts as the step's.
    own = [kernel for kernel in kernels if kernel.module in (module, "")]
    steps = _count(own) if steps is None else steps
    times = summed(_times(own))
    return ProfiledStep(
        device=device,
        module=module,
        steps=steps,
        seconds=(max(kernel.end for kernel in own) - own[0].start) / steps,
        times=tuple(_divided(one, steps) for one in times),
        others=sum(s for name, s in spent.items() if name not in (module, "")),
    )


def _count(kernels: Sequence[Kernel]) -> int:
    """Counts the steps: what is in no loop runs once in each."""
    runs = collections.Counter(kernel.instruction for kernel in kernels)
    del runs[""]
    return min(runs.values(), default=1)


def _times(kernels: Sequence[Kernel]) -> Iterator[UnitTime]:
    busy = _union((k.start, k.end) for k in kernels if k.work == COMPUTE)
    for kernel in kernels:
        seconds = kernel.end - kernel.start
        if kernel.work == COMPUTE:
            yield UnitTime(kernel.unit, COMPUTE, 0, seconds, 0.0)
        else:
            hidden = _covered(kernel.start, kernel.end, busy)
            yield UnitTime(kernel.unit, kernel.work, 1, seconds, seconds - hidden)


def _divided(one: UnitTime, steps: int) -> UnitTime:
    return UnitTime(
        one.unit,
        one.work,
        one.times / steps,
        one.seconds / steps,
        one.exposed_seconds / steps,
    )


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns ascending intervals without overlaps."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _covered(start: float, end: float, busy: Sequence[Interval]) -> float:
    """Returns the seconds between `start` and `end` that intervals cover."""
    first = bisect.bisect_right(busy, (start, math.inf)) - 1
    total = 0.0
    for a, b in itertools.islice(busy, max(first, 0), None):
        if a >= end:
            break
        total += max(0.0, min(b, end) - max(a, start))
    return total
