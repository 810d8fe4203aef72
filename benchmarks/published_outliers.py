"""Rows whose prediction is far off, and a run of nccl-tests that is not met."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from unittest import mock

from published_errors import (
    Compared,
    Constants,
    compared,
    row_of,
    schedule_of,
    summary,
    unfused,
)
from published_rows import program_of

from fsdp_jax.hlo._collectives import Collective
from fsdp_jax.hlo._parse import Shape
from fsdp_jax.planner import _interconnect
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._timeline import replay

FAR = 0.25
"""Error of a step from which the report says why."""

WHY = {
    "Megatron-Bridge": "Transformer Engine casts to 8-bit floats in the kernels that "
    "make a tensor; here XLA reads it again for its largest value, and again to cast",
    "axlearn JAX": "the comment of fuji.py has the mesh and the GPUs as here; the "
    "project's paper (arXiv 2507.05411, as wizwand.com lists it) has 9.2 s for the "
    "same model on as many H100s",
}
"""Reasons by system."""

RANKS, SIZE, PUBLISHED = 256, 2 << 30, 200.0
"""The all-gather of NVIDIA/nccl#1218: H100s, bytes, and GB/s of bus bandwidth.

One iteration, with 16 channels and no check (`-n 1 -c 0`, NCCL_MAX_NCHANNELS=16), by
a process a node; the same flags give an all-reduce of 340 GB/s.
"""


def far_off(rows: Iterable[Compared]) -> list[dict]:
    """Returns the rows that are far off, each with the reason.

    Each has the seconds of its step, too, if elementwise kernels moved half the bytes.
    """
    return [
        row_of(one)
        | {"with_half_the_traffic_s": round(_lean_seconds(one), 3)}
        | {"why": WHY[one.row["system"]]}
        for one in rows
        if abs(one.error) > FAR
    ]


def _lean_seconds(one: Compared) -> float:
    program = program_of(one.row)
    schedule = unfused(schedule_of(program.name), 0.5)
    return replay(schedule, Constants().cost_of(one.row, program), program.gpus).seconds


def gather_seconds() -> tuple[float, float]:
    """Returns the seconds of the all-gather of `PUBLISHED`: modelled, and published."""
    sent, received = Shape("u8", (SIZE // RANKS,)), Shape("u8", (SIZE,))
    groups = frozenset({tuple(range(RANKS))})
    found = Collective("all-gather", (sent,), (received,), groups, "", "all-gather")
    moved = _interconnect.communicated_bytes(found, RANKS)
    cost = GPUS["h100"].cost
    modelled = _interconnect.communication_seconds(found, RANKS, cost)
    return modelled, moved / (1e9 * PUBLISHED)


def gather_over_nodes() -> dict:
    """Returns what would follow if the all-gather of `PUBLISHED` were met.

    A longer step between nodes meets it: the seconds that it takes more are those of
    the 31 steps between 32 nodes. Constants are not fitted again.
    """
    modelled, published = gather_seconds()
    nodes = RANKS // GPUS["h100"].cost.devices_per_node
    more = (published - modelled) / (nodes - 1)
    slower = tuple(
        dataclasses.replace(protocol, network=protocol.network + more)
        for protocol in _interconnect.PROTOCOLS
    )
    with mock.patch.object(_interconnect, "PROTOCOLS", slower):
        rows = compared()
    return {
        "source": "NVIDIA/nccl#1218",
        "published_gb_s": PUBLISHED,
        "modelled_gb_s": round(PUBLISHED * published / modelled, 1),
        "if_met": {
            "microseconds_more_a_step_between_nodes": round(1e6 * more, 1),
            "held_back": summary(one for one in rows if one.row["split"] == "test"),
            "fit": summary(one for one in rows if one.row["split"] == "fit"),
            "rows_of_256_h100s": [
                row_of(one)
                for one in rows
                if one.row["gpus"] == str(RANKS) and "MaxText" in one.row["system"]
            ],
        },
    }
