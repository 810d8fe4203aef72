"""Errors of estimates on published runs: the range that is printed with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fsdp_jax.planner._gpu import GPU


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Errors of estimated step times on published runs.

    Attributes:
      rows: Published runs that were estimated.
      median: Median of |estimated / published - 1|.
      held_back_rows: Runs of sources that no constant was fitted to.
      held_back_median: Median of the same, of these.
      held_back_percentile_90: Value that nine in ten of these do not exceed.
      gpus: Runs by key of `GPUS`.
      axes: Runs by mesh axis that had more than one device, other than `dp_shard`.
    """

    rows: int
    median: float
    held_back_rows: int
    held_back_median: float
    held_back_percentile_90: float
    gpus: Mapping[str, int]
    axes: Mapping[str, int]


# Written by `benchmarks/validate_planner.py report`, and compared with it by a test.
PUBLISHED = Accuracy(
    rows=116,
    median=0.0499,
    held_back_rows=33,
    held_back_median=0.0708,
    held_back_percentile_90=0.1363,
    gpus={"b200": 1, "h100": 99, "h100-500w": 13, "h200": 3},
    axes={"cp": 4, "dp_outer": 16, "tp": 3},
)


FEW = 3
"""Runs on a kind of GPU below which their number is said."""


def seconds_range(seconds: float) -> tuple[float, float]:
    """Returns the seconds between which nine of ten held-back runs would lie."""
    off = PUBLISHED.held_back_percentile_90
    return seconds / (1 + off), seconds / (1 - off)


def overlap(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Returns whether two ranges share a value."""
    return a[0] <= b[1] and b[0] <= a[1]


def rests_on(gpu: GPU, mesh: Mapping[str, int]) -> str:
    """Says what the range rests on: how many published runs, and of what kind none.

    Args:
      gpu: GPU of the estimate.
      mesh: Sizes of the mesh axes.
    """
    missing = [
        axis
        for axis, size in mesh.items()
        if size > 1 and axis != "dp_shard" and axis not in PUBLISHED.axes
    ]
    absent = [f"none with {axis}" for axis in missing]
    count = PUBLISHED.gpus.get(gpu.name, 0)
    if not count:
        absent.append(f"none on {gpu.name}: not validated")
    elif count < FEW:
        absent.append(f"only {count} on {gpu.name}")
    return "; ".join(
        [
            f"median error {PUBLISHED.median:.0%} over {PUBLISHED.rows} published runs",
            f"{PUBLISHED.held_back_median:.0%} over {PUBLISHED.held_back_rows} that "
            "nothing was fitted to",
            *absent,
        ]
    )
