"""A training step compiled for GPUs and replayed: its figures, tables and files."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax

from fsdp_jax._report import Grid, format_bytes, html_document, html_page
from fsdp_jax._scopes import PREFETCH, is_in
from fsdp_jax.planner._accuracy import rests_on, seconds_range
from fsdp_jax.planner._comm_table import SentRow, sent_grid
from fsdp_jax.planner._gpu import GPU
from fsdp_jax.planner._host_memory import Offloaded
from fsdp_jax.planner._kernel import attention_names
from fsdp_jax.planner._memory import Memory
from fsdp_jax.planner._plot import draw_estimate
from fsdp_jax.planner._schedule import CompiledSchedule, kernels_of
from fsdp_jax.planner._timeline import Timeline, floor_seconds
from fsdp_jax.planner._trace_file import save_trace
from fsdp_jax.planner._unit_times import unit_times
from fsdp_jax.sharding._config import ZERO_DP_STRATEGIES
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.sharding._stages import Schedule
from fsdp_jax.training._memory_check import memory_alarms


@dataclasses.dataclass(frozen=True, repr=False)
class StepEstimate:
    """A training step compiled for GPUs and replayed on a cost model.

    `print(estimate)` shows it as a table.

    Attributes:
      gpu: GPU with its cost model.
      plan: Plan on a mesh of abstract GPUs.
      compiled: Compiled step; it cannot run here.
      schedule: Schedule of the compiled step.
      timeline: Replay of the schedule.
      guided: Whether XLA's scheduler was given the cost model, see `estimate_step`.
      compiled_bytes: Peak bytes on a GPU: XLA's buffer assignment, and the workspace of
        fused attention, which is not in it.
      memory: Peak bytes by kind, predicted from the plan and the trace alone.
      offloaded: State stored on the host, and its copies; None without offload.
      sent: One row per collective.
      tokens: Tokens of a global batch; None if not given.
      model_flops: FLOPs of forward and backward on one device, without recomputation.
      num_microbatches: Number of microbatches per step.
    """

    gpu: GPU
    plan: Plan
    compiled: jax.stages.Compiled
    schedule: CompiledSchedule
    timeline: Timeline
    guided: bool
    compiled_bytes: int
    memory: Memory
    offloaded: Offloaded | None
    sent: tuple[SentRow, ...]
    tokens: int | None
    model_flops: float
    num_microbatches: int = 1

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the mesh."""
        return self.plan.mesh.size

    @property
    def num_params(self) -> int:
        """Number of the model's parameters."""
        return sum(math.prod(param.shape) for param in self.plan.param_plans)

    @property
    def seconds_range(self) -> tuple[float, float]:
        """Seconds of a step, lowest and highest, see `rests_on` in `to_dict()`."""
        return seconds_range(self.timeline.seconds)

    @functools.cached_property
    def floor_seconds(self) -> float:
        """Seconds of the step if every collective were free, see `floor_seconds`."""
        return floor_seconds(self.schedule, self.gpu.cost, self.plan.mesh.size)

    @property
    def attention(self) -> tuple[str, ...]:
        """Names of the fused attention kernels in the compiled step; empty for none."""
        return attention_names(kernels_of(self.schedule))

    @property
    def exposed(self) -> float:
        """Exposed communication as a fraction of the step."""
        return self.timeline.exposed_seconds / self.timeline.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, relative to the data sheet's peak.

        Attention counts as full, causal or not. Over `cp`, where it is computed in
        blocks, only the computed blocks count.
        """
        peak = self.gpu.cost.peak_flops
        return self.model_flops / self.timeline.seconds / peak

    @property
    def bubble(self) -> float | None:
        """Fraction of ticks in which a pipeline stage is idle; None without stages."""
        if self.plan.mesh.shape["pp"] == 1:
            return None
        return Schedule(self.plan.stages, self.num_microbatches).bubble

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all GPUs together; None if `tokens` is None."""
        return None if self.tokens is None else self.tokens / self.timeline.seconds

    @property
    def fits(self) -> bool:
        """Whether the compiled step leaves a tenth of the GPU's memory free."""
        return self.compiled_bytes <= 0.9 * self.gpu.memory

    @property
    def offload_seconds(self) -> float:
        """Seconds of the copies to and from the host, if nothing hides them."""
        found = self.offloaded
        return found.seconds(self.gpu.cost.host_bandwidth) if found else 0.0

    @functools.cached_property
    def memory_alarms(self) -> tuple[str, ...]:
        """Messages of the `MemoryWarning` of a first run on the GPUs."""
        return memory_alarms(self.compiled, self.gpu.memory)

    def to_dict(self) -> dict[str, Any]:
        """Returns the estimate as JSON values, in bytes and seconds."""
        speed = self.tokens_per_second
        return {
            "title": self.title,
            "gpu": self.gpu.name,
            "gpus": self.num_gpus,
            "mesh": {a: n for a, n in self.plan.mesh.shape.items() if n > 1},
            "jax": jax.__version__,
            "guided": self.guided,
            "cost_model": dataclasses.asdict(self.gpu.cost),
            "step_seconds": self.timeline.seconds,
            "step_seconds_range": list(self.seconds_range),
            "rests_on": rests_on(self.gpu, self.plan.mesh.shape),
            "attention": list(self.attention),
            "compute_seconds": self.timeline.compute_seconds,
            "communication_seconds": self.timeline.communication_seconds,
            "exposed_seconds": self.timeline.exposed_seconds,
            "floor_seconds": self.floor_seconds,
            "tokens": self.tokens,
            "tokens_per_second_per_gpu": None
            if speed is None
            else speed / self.num_gpus,
            "mfu": self.mfu,
            "bubble": self.bubble,
            "fits": self.fits,
            "memory_of_gpu": self.gpu.memory,
            "memory_compiled": self.compiled_bytes,
            "offloaded": self.offloaded and dataclasses.asdict(self.offloaded),
            "offload_seconds": self.offload_seconds,
            "memory_alarms": list(self.memory_alarms),
            "memory_predicted": {
                **dataclasses.asdict(self.memory),
                "total": self.memory.total,
            },
            "collectives": [dataclasses.asdict(row) for row in self.sent],
            "unit_times": [
                dataclasses.asdict(one) for one in unit_times(self.timeline)
            ],
        }

    def save_json(self, path: str | Path) -> None:
        """Writes `to_dict()` to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def save_html(self, path: str | Path) -> None:
        """Writes headline and tables to a file for a browser."""
        Path(path).write_text(html_document(self.title, self._repr_html_()))

    def save_picture(self, path: str | Path) -> None:
        """Plots memory and timeline to a file, PNG or SVG by its suffix."""
        sizes = self.memory, self.compiled_bytes
        draw_estimate(*sizes, self.gpu, self.timeline, path, title=self.title)

    def save_trace(self, path: str | Path) -> None:
        """Writes the timeline as a trace for Perfetto or chrome://tracing."""
        save_trace(self.timeline, path, title=self.title)

    @property
    def title(self) -> str:
        """GPUs, mesh, strategy and size of the model, for pictures and traces."""
        size = f"{self.num_params / 1e9:,.2f} billion parameters"
        return f"{_machine(self)}, {_strategy(self.plan)}, {size}"

    def __repr__(self) -> str:
        """Formats headline and tables as text."""
        parts = [_memory_grid(self).as_text(), "", sent_grid(self.sent).as_text()]
        return "\n".join([*_headline(self), "", *parts])

    def _repr_html_(self) -> str:
        """Formats headline and tables as HTML, with bars for bytes and exposed time."""
        parts = [_memory_grid(self), sent_grid(self.sent)]
        return html_page([*_headline(self), *parts])


def _headline(estimate: StepEstimate) -> list[str]:
    line, mesh = estimate.timeline, estimate.plan.mesh.shape
    low, high = estimate.seconds_range
    times = (
        f"step: {line.seconds * 1e3:,.1f} ms ({low * 1e3:,.1f} to {high * 1e3:,.1f}), "
        f"{line.exposed_seconds * 1e3:,.1f} ms of it exposed communication "
        f"({estimate.exposed:.1%}) of {line.communication_seconds * 1e3:,.1f} ms"
    )
    floor = (
        f"floor: {estimate.floor_seconds * 1e3:,.1f} ms with every collective free; "
        f"the step is {line.seconds / estimate.floor_seconds:.2f} of it"
    )
    basis = f"range: {rests_on(estimate.gpu, mesh)}"
    kernels = ", ".join(estimate.attention) or "none that is fused"
    speed = f"MFU {estimate.mfu:.1%}"
    if (rate := estimate.tokens_per_second) is not None:
        each = f"{rate / estimate.num_gpus:,.0f} tokens/s/GPU"
        speed = f"{each} with {estimate.tokens:,} tokens a step, {speed}"
    room = f"{estimate.compiled_bytes / estimate.gpu.memory:.0%} of the GPU's memory"
    verdict = "fits" if estimate.fits else "DOES NOT FIT"
    return [
        _machine(estimate),
        times,
        floor,
        basis,
        speed,
        f"attention kernels: {kernels}",
        *_bubble_line(estimate),
        *_padding_line(estimate.plan),
        f"memory: {format_bytes(estimate.compiled_bytes)} a GPU as compiled, "
        f"{room}: {verdict}",
        *_offload_line(estimate),
        *(f"memory alarm: {alarm}" for alarm in estimate.memory_alarms),
        *_advice(estimate),
    ]


def _machine(estimate: StepEstimate) -> str:
    sizes = estimate.plan.mesh.shape.items()
    axes = ", ".join(f"{a}={n}" for a, n in sizes if n > 1) or "a single one"
    return f"{estimate.num_gpus} x {estimate.gpu.description} ({axes})"


def _strategy(plan: Plan) -> str:
    zero = plan.config.zero_dp_strategy
    return f"ZeRO-{ZERO_DP_STRATEGIES.index(str(zero))}"


def _bubble_line(estimate: StepEstimate) -> list[str]:
    if estimate.bubble is None:
        return []
    return [
        f"pipeline: {estimate.bubble:.1%} of a stage's turns are empty, which is in "
        "the step as time that others compute"
    ]


def _padding_line(plan: Plan) -> list[str]:
    """Says of padding that takes more than a twentieth of what is sent and stored."""
    sizes = sum(math.prod(param.shape) for param in plan.param_plans)
    stored = sum(math.prod(param.padded_shape) for param in plan.param_plans)
    if stored <= 1.05 * sizes:
        return []
    padded = sum(param.is_padded for param in plan.param_plans)
    return [
        f"padding: no dim of {padded} parameters divides into their shards; with zeros "
        f"the model is stored and sent {stored / sizes:.2f} times as large as it is"
    ]


def _offload_line(estimate: StepEstimate) -> list[str]:
    if (found := estimate.offloaded) is None:
        return []
    bandwidth = estimate.gpu.cost.host_bandwidth
    return [
        f"on the host: {format_bytes(found.bytes)} a GPU; a step copies "
        f"{format_bytes(found.fetched)} here and {format_bytes(found.returned)} back, "
        f"{estimate.offload_seconds * 1e3:,.1f} ms at {bandwidth / 1e9:,.0f} GB/s, on "
        "top of the step unless hidden"
    ]


def _advice(estimate: StepEstimate) -> list[str]:
    """Says of units whose gathers are exposed over 5 % of the step what hides them."""
    ahead = {
        sent.collective.unit
        for sent in estimate.timeline.sent
        if is_in(sent.collective.op_name, PREFETCH)
    }
    waits: dict[str, float] = {}
    for row in estimate.sent:
        if row.op == "all-gather" and row.unit in set(estimate.plan.units) - ahead:
            waits[row.unit] = waits.get(row.unit, 0.0) + row.exposed_seconds
    advice = "no unit before it hides them, or the log says why none can"
    if not estimate.plan.config.prefetch:
        advice = "FSDPConfig(prefetch=1) hides them, or the log says why it cannot"
    return [
        f"the gathers of '{unit}' are waited for, {seconds * 1e3:,.1f} ms a step: "
        f"{advice}"
        for unit, seconds in waits.items()
        if seconds > 0.05 * estimate.timeline.seconds
    ]


def _memory_grid(estimate: StepEstimate) -> Grid:
    memory = estimate.memory
    rows = [
        (name, format_bytes(size), f"{size / memory.total:.1%}")
        for name, size in dataclasses.asdict(memory).items()
    ]
    rows.append(("predicted together", format_bytes(memory.total), ""))
    more = estimate.compiled_bytes / memory.total - 1
    rows.append(("as compiled", format_bytes(estimate.compiled_bytes), f"{more:+.1%}"))
    columns = {"memory a GPU": "left", "bytes": "right", "": "right"}
    sizes = [*dataclasses.asdict(memory).values(), memory.total]
    return Grid(columns, rows, [*sizes, estimate.compiled_bytes])
