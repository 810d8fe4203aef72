"""Errors of the planner on published steps, and the fit of its few constants."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Sequence

import scipy.optimize
from published_models import Program
from published_rows import (
    SCHEDULES,
    Row,
    attention_of,
    is_eager,
    network_bandwidth,
    program_of,
    read_index,
    read_rows,
    reason_not_built,
)

from fsdp_jax.planner._gpu import FLOAT8, GPUS, MATMUL, MEMORY, SLOWDOWN, CostModel
from fsdp_jax.planner._kernel import Kernel
from fsdp_jax.planner._schedule import CompiledSchedule, Loop, Run, Step
from fsdp_jax.planner._schedule_file import load_schedule
from fsdp_jax.planner._timeline import replay

REPORTED = ("jax", "jaxlib", "jax-cuda12-plugin")

EAGER = 1.108
"""Memory traffic of PyTorch without a compiler, relative to XLA's fused kernels.

Fitted to llm-foundry's rows, after the four of `fsdp_jax.planner`.
"""

FLASH_ATTENTION_2 = (0.375, 0.33)
"""Part of the peak of FlashAttention-2 on an H100, forward and backward.

Source: FlashAttention-3 (arXiv 2407.08608), figures 5 and 6, heads of 128, long rows:
370 and 322 of 989 TFLOP/s.
"""


TRITON = (FLASH_ATTENTION_2[0] / 1.4, FLASH_ATTENTION_2[1] / 2)
"""Part of the peak of FlashAttention's first Triton kernel, forward and backward.

Source: FlashAttention-2 (arXiv 2307.08691), which is 1.3 to 1.5 times as fast forward
and around twice as fast backward.
"""

ATTENTION = {"flash_attention_2": FLASH_ATTENTION_2, "triton": TRITON}
"""Parts of the peak of the kernels that are not cuDNN's."""


@dataclasses.dataclass(frozen=True)
class Constants:
    """What the fit moves; the rest is of data sheets and of nccl-tests.

    Attributes:
      matmul: Part of the peak that large products reach.
      float8: Speed of products in 8-bit floats relative to 16-bit.
      memory: Part of the peak memory bandwidth that elementwise kernels reach.
      slowdown: Part of a kernel's speed that is lost while a collective runs.
      eager: Memory traffic without a compiler relative to XLA's.
    """

    matmul: float = MATMUL
    float8: float = FLOAT8
    memory: float = MEMORY
    slowdown: float = SLOWDOWN
    eager: float = EAGER

    def cost_of(self, row: Row, program: Program) -> CostModel:
        """Returns the cost model of a row's GPU and kernels with these constants."""
        gpu = GPUS[program.gpu]
        cost = gpu.cost
        ours = Constants()
        changed = {
            "flops": cost.flops / ours.matmul * self.matmul,
            "float8_speed": self.float8,
            "memory_bandwidth": cost.memory_bandwidth / ours.memory * self.memory,
            "overlap_slowdown": self.slowdown,
        }
        if parts := ATTENTION.get(attention_of(row)):
            peak = cost.flops / ours.matmul
            forward, backward = (part * peak for part in parts)
            changed |= {"attention_forward": forward, "attention_backward": backward}
        if network := network_bandwidth(row):
            changed["network_bandwidth"] = network
        return dataclasses.replace(cost, **changed)


@dataclasses.dataclass(frozen=True)
class Compared:
    """One row with its prediction.

    Attributes:
      row: Row of the CSV.
      seconds: Predicted seconds of a step.
      memory: Predicted bytes of a GPU.
    """

    row: Row
    seconds: float
    memory: int

    @property
    def error(self) -> float:
        """Predicted over published seconds, minus one."""
        return self.seconds / float(self.row["step_s"]) - 1


def built() -> list[tuple[Row, Program]]:
    """Returns the rows whose schedule is kept, with their programs."""
    index = read_index()
    pairs = ((row, program_of(row)) for row in read_rows() if not reason_not_built(row))
    return [(row, program) for row, program in pairs if program.name in index]


@functools.cache
def schedule_of(name: str) -> CompiledSchedule:
    """Returns the kept schedule of a program."""
    return load_schedule(SCHEDULES / f"{name}.json.gz")


def predict(row: Row, program: Program, constants: Constants) -> float:
    """Returns the predicted seconds of a row's step."""
    schedule = schedule_of(program.name)
    if is_eager(row):
        schedule = unfused(schedule, constants.eager)
    cost = constants.cost_of(row, program)
    return replay(schedule, cost, program.gpus).seconds


def unfused(schedule: CompiledSchedule, factor: float) -> CompiledSchedule:
    """Returns a schedule whose elementwise kernels move `factor` times the bytes."""

    def step_of(step: Step) -> Step:
        if isinstance(step, Loop):
            return Loop(step.times, unfused(step.body, factor))
        if isinstance(step, Run) and step.kernel.kind == "memory":
            return Run(_scaled(step.kernel, factor), step.label)
        return step

    return tuple(map(step_of, schedule))


def _scaled(kernel: Kernel, factor: float) -> Kernel:
    return dataclasses.replace(kernel, bytes=kernel.bytes * factor)


def compared(constants: Constants | None = None) -> list[Compared]:
    """Returns every built row with its prediction."""
    index, constants = read_index(), constants or Constants()
    return [
        Compared(row, predict(row, program, constants), index[program.name]["memory"])
        for row, program in built()
    ]


def fitted() -> dict[str, float]:
    """Returns the constants that match the rows of the sources for the fit.

    Those of the planner to the rows whose steps were compiled, as ours are; then
    `eager` to the others, so that what no compiler fused does not move what GPUs reach.
    """
    rows = [pair for pair in built() if pair[0]["split"] == "fit"]
    compiled = [pair for pair in rows if not is_eager(pair[0])]
    others = [pair for pair in rows if is_eager(pair[0])]
    names = [name for name in LIMITS if name != "eager"]
    found = _least_squares(Constants(), names, compiled)
    return dataclasses.asdict(_least_squares(found, ["eager"], others))


def _least_squares(
    start: Constants, names: Sequence[str], rows: Sequence[tuple[Row, Program]]
) -> Constants:
    """Returns constants of which those of `names` are fitted to rows.

    Soft least squares of log(predicted / published): an error far above `_USUAL`, as
    that of one row with a source of its own, counts by its size and not its square.
    Each source counts the same, whatever its number of rows.
    """
    sources = collections.Counter(row["source"] for row, _ in rows)

    def constants_of(values: Sequence[float]) -> Constants:
        changed = dict(zip(names, (round(float(x), 3) for x in values), strict=True))
        return dataclasses.replace(start, **changed)

    def residuals(values: Sequence[float]) -> list[float]:
        changed = dict(zip(names, map(float, values), strict=True))
        constants = dataclasses.replace(start, **changed)
        return [
            math.log(predict(row, program, constants) / float(row["step_s"]))
            / math.sqrt(sources[row["source"]])
            for row, program in rows
        ]

    found = scipy.optimize.least_squares(
        residuals,
        [getattr(start, name) for name in names],
        bounds=list(zip(*(LIMITS[name] for name in names), strict=True)),
        diff_step=0.02,
        xtol=1e-3,
        loss="soft_l1",
        f_scale=_USUAL,
        max_nfev=12,
    )
    return constants_of(found.x)


_USUAL = 0.1
"""Error of a row, of its logarithm, from which it counts less than by its square."""

LIMITS = {
    "matmul": (0.5, 0.9),
    "float8": (1.2, 2.0),
    "memory": (0.6, 0.95),
    "slowdown": (0.0, 0.3),
    "eager": (1.0, 5.0),
}
"""Bounds of the fit, by field of `Constants`."""


def report(rows: Sequence[Compared]) -> dict:
    """Returns errors of step times and memory, by source, and what is not built."""
    listed = read_rows()
    known = [one.row for one in rows]
    return {
        "constants": dataclasses.asdict(Constants()),
        "held_back": summary(one for one in rows if one.row["split"] == "test"),
        "fit": summary(one for one in rows if one.row["split"] == "fit"),
        "all": summary(rows),
        "gpus": _counted(program_of(row).gpu for row in known),
        "axes": _counted(
            axis
            for program in map(program_of, known)
            for axis in ("dp_outer", "tp", "cp")
            if program.axes[axis] > 1
        ),
        "by_source": {
            source: {"split": split} | summary(_of(rows, source))
            for source, split in sorted({(r["source"], r["split"]) for r in known})
        },
        "memory": [_memory(one) for one in rows if one.row["mem_gib"]],
        "rows": [row_of(one) for one in rows],
        "not_built": [
            {key: row[key] for key in ("source", "model", "gpu", "gpus")}
            | {"reason": reason_not_built(row) or "its schedule was not compiled yet"}
            for row in listed
            if row not in known
        ],
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(names).items()))


def _of(rows: Iterable[Compared], source: str) -> list[Compared]:
    return [one for one in rows if one.row["source"] == source]


def summary(rows: Iterable[Compared]) -> dict[str, float | int | None]:
    """Returns the number of rows, and median and 90th percentile of |error|."""
    errors = sorted(abs(one.error) for one in rows)
    if not errors:
        return {"rows": 0, "median": None, "percentile_90": None}
    at = math.ceil(0.9 * len(errors)) - 1
    median = statistics.median(errors)
    return {
        "rows": len(errors),
        "median": round(median, 4),
        "percentile_90": round(errors[at], 4),
    }


_SAID = ("split", "source", "system", "model", "gpu", "gpus", "precision", "seq")


def row_of(one: Compared) -> dict:
    """Returns what a row says, with its prediction, as JSON values."""
    return {key: one.row[key] for key in _SAID} | {
        "published_s": float(one.row["step_s"]),
        "predicted_s": round(one.seconds, 3),
        "error": round(one.error, 4),
    }


def _memory(one: Compared) -> dict:
    published, predicted = float(one.row["mem_gib"]), one.memory / 2**30
    return {key: one.row[key] for key in _SAID} | {
        "published_gib": published,
        "predicted_gib": round(predicted, 1),
        "error": round(predicted / published - 1, 4),
    }
