"""Estimates the memory and time of a training step on GPUs that are not present."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import optax

from fsdp_jax._report import Grid, format_bytes, html_page
from fsdp_jax._tree import PyTree
from fsdp_jax.hlo._parse import parse
from fsdp_jax.planner._accuracy import rests_on, seconds_range
from fsdp_jax.planner._comm_table import SentRow, sent_grid, sent_rows
from fsdp_jax.planner._compile import compile_scheduled, gpu_devices, text_of
from fsdp_jax.planner._flops import product_flops
from fsdp_jax.planner._gpu import GPU, find_gpu
from fsdp_jax.planner._host_memory import Offloaded, mark_host_arguments, offloaded
from fsdp_jax.planner._kernel import attention_names, workspace_bytes
from fsdp_jax.planner._memory import Memory, predict_memory
from fsdp_jax.planner._plot import draw_estimate
from fsdp_jax.planner._schedule import Schedule, kernels_of, schedule_of
from fsdp_jax.planner._timeline import Timeline, replay
from fsdp_jax.planner.liveness._trace import on_one_device
from fsdp_jax.sharding._fully_shard import fully_shard
from fsdp_jax.sharding._mesh import AXES, make_mesh
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.sharding._stages import Schedule
from fsdp_jax.step._loss import LossFn, LossForm
from fsdp_jax.training._compiler_options import options_of
from fsdp_jax.training._gradients import global_loss
from fsdp_jax.training._memory_check import compiled_bytes, memory_alarms
from fsdp_jax.training._state import abstract_state
from fsdp_jax.training._train_step import make_train_step


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
    schedule: Schedule
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
    def seconds_range(self) -> tuple[float, float]:
        """Seconds of a step, lowest and highest: nine of ten published runs are so."""
        return seconds_range(self.timeline.seconds)

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
            "wire_seconds": self.timeline.wire_seconds,
            "exposed_seconds": self.timeline.exposed_seconds,
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
        }

    def save_json(self, path: str | Path) -> None:
        """Writes `to_dict()` to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def save_picture(self, path: str | Path) -> None:
        """Plots memory and timeline to a file, PNG or SVG by its suffix."""
        draw_estimate(self.memory, self.compiled_bytes, self.gpu, self.timeline, path)

    def __repr__(self) -> str:
        """Formats headline and tables as text."""
        parts = [_memory_grid(self).as_text(), "", sent_grid(self.sent).as_text()]
        return "\n".join([*_headline(self), "", *parts])

    def _repr_html_(self) -> str:
        """Formats headline and tables as HTML, with bars for bytes and exposed time."""
        parts = [_memory_grid(self), sent_grid(self.sent)]
        return html_page([*_headline(self), *parts])


def estimate_step(
    plan: Plan,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    batch: PyTree,
    *,
    gpu: str | GPU = "h200",
    gpus: int | None = None,
    mesh: Mapping[str, int] | None = None,
    tokens: int | None = None,
    options: Mapping[str, Any] | None = None,
    guide: bool = True,
    **step_options: Any,
) -> StepEstimate:
    """Compiles the training step for absent GPUs, and estimates its cost.

    The compiled program is the one that would run. Its schedule is replayed on an
    analytical model of the GPU, with one stream for computation and one for
    communication. If more than 2 % of the step is exposed communication, the step is
    compiled again with the model's times given to XLA's scheduler, and the faster
    program is kept.

    Args:
      plan: Plan from `fully_shard`, on any mesh.
      loss_fn: Loss function, as for `make_train_step`.
      tx: Optimizer.
      batch: Global batch, of concrete or abstract arrays.
      gpu: Name in `GPUS`, or a GPU, e.g. with another cost model.
      gpus: Number of GPUs; None for the size of the plan's mesh.
      mesh: Sizes of mesh axes, at most one of them -1. None for those of the plan's
        mesh, with `dp_shard` as the remainder.
      tokens: Tokens of the batch, for tokens per second.
      options: XLA compiler options; None for `compiler_options()`, with those for `tp`
        and `cp` if the mesh has them.
      guide: Whether to compile the second time. A schedule that hides more may hold
        more: its memory is up to 10 % above the prediction.
      **step_options: Options of `make_train_step`.

    Returns:
      The estimate; print it for a table.

    Raises:
      ValueError: If the GPU is unknown, the mesh does not fit, or XLA's compiler for
        GPUs is not installed.
    """
    gpu = find_gpu(gpu)
    count = plan.mesh.size if gpus is None else gpus
    sizes = {axis: plan.mesh.shape[axis] for axis in AXES} | {"dp_shard": -1}
    given = sizes if mesh is None else dict(mesh)
    there = make_mesh(**given, devices=gpu_devices(gpu, count))
    plan = fully_shard(plan.make_model, there, plan.unit_specs, plan.config)
    # None for jit: they would still apply beneath the `options` of `compile`.
    step = make_train_step(plan, loss_fn, tx, compiler_options={}, **step_options)
    state = abstract_state(plan, tx)
    abstract_batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch
    )
    if options is None:
        options = options_of(there)
    lowered = step.lower(state, abstract_batch)
    if plan.config.offload:
        mark_host_arguments(plan, lowered, state)
    scheduled = compile_scheduled(lowered, gpu.cost, count, options, guide=guide)
    traced = step.jitted.trace(state, abstract_batch).jaxpr
    return StepEstimate(
        gpu=gpu,
        plan=plan,
        compiled=scheduled.compiled,
        schedule=scheduled.schedule,
        timeline=scheduled.timeline,
        guided=scheduled.guided,
        compiled_bytes=compiled_bytes(scheduled.compiled)
        + workspace_bytes(kernels_of(scheduled.schedule)),
        memory=predict_memory(plan, state, abstract_batch, traced),
        offloaded=offloaded(plan, state) if plan.config.offload else None,
        sent=sent_rows(scheduled.timeline, plan),
        tokens=tokens,
        model_flops=_model_flops(plan, loss_fn, step_options, abstract_batch) / count,
        num_microbatches=step.num_microbatches,
    )


def count_on_cpu(
    plan: Plan,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    batch: PyTree,
    **step_options: Any,
) -> tuple[int, tuple[SentRow, ...]]:
    """Counts a step's memory and collectives with XLA:CPU, where XLA:GPU is missing.

    Args:
      plan: Plan from `fully_shard`, on simulated CPU devices.
      loss_fn: Loss function, as for `make_train_step`.
      tx: Optimizer.
      batch: Global batch, of concrete or abstract arrays.
      **step_options: Options of `make_train_step`.

    Returns:
      Peak bytes on a device; and the collectives, in the dtypes of XLA:CPU and with
      times that are not meaningful.
    """
    step = make_train_step(plan, loss_fn, tx, **step_options)
    compiled = step.lower(abstract_state(plan, tx), batch).compile()
    # XLA:CPU runs all collectives synchronously: the counts need no particular model.
    cost = find_gpu("h200").cost
    schedule = schedule_of(parse(text_of(compiled)))
    timeline = replay(schedule, cost, plan.mesh.size)
    return compiled_bytes(compiled), sent_rows(timeline, plan)


def _model_flops(plan: Plan, loss_fn, options, batch) -> float:
    """Returns the FLOPs of the whole batch: forward, and backward as twice that.

    Traced for one device, so that no axis is partitioned by XLA and all shapes are
    known.
    """
    alone = make_mesh(devices=list(plan.mesh.devices.flat[:1]))
    plan = fully_shard(plan.make_model, alone, plan.unit_specs, plan.config)
    state = abstract_state(plan, optax.identity())
    form = LossForm(
        options.get("has_aux", False), options.get("calculate_per_token_loss", False)
    )
    rng = jax.eval_shape(lambda: jax.random.key(0))
    traced = jax.make_jaxpr(global_loss(plan, loss_fn, form))(
        state.params, batch, rng, state.model_state
    )
    program = on_one_device(traced.jaxpr)
    assert program is not None
    return 3 * product_flops(program)


def _headline(estimate: StepEstimate) -> list[str]:
    line, mesh = estimate.timeline, estimate.plan.mesh.shape
    axes = ", ".join(f"{a}={n}" for a, n in mesh.items() if n > 1) or "a single one"
    low, high = estimate.seconds_range
    times = (
        f"step: {line.seconds * 1e3:,.1f} ms ({low * 1e3:,.0f} to {high * 1e3:,.0f}), "
        f"{line.exposed_seconds * 1e3:,.1f} ms of it exposed communication "
        f"({estimate.exposed:.1%}) of {line.wire_seconds * 1e3:,.1f} ms on the wire"
    )
    basis = f"range: {rests_on(estimate.gpu, mesh)}"
    kernels = ", ".join(estimate.attention) or "none that is fused"
    speed = f"MFU {estimate.mfu:.1%}"
    if (rate := estimate.tokens_per_second) is not None:
        speed = f"{rate / estimate.num_gpus:,.0f} tokens/s/GPU, {speed}"
    room = f"{estimate.compiled_bytes / estimate.gpu.memory:.0%} of the GPU's memory"
    verdict = "fits" if estimate.fits else "DOES NOT FIT"
    return [
        f"{estimate.num_gpus} x {estimate.gpu.description} ({axes})",
        times,
        basis,
        speed,
        f"attention kernels: {kernels}",
        *_bubble_line(estimate),
        f"memory: {format_bytes(estimate.compiled_bytes)} a GPU as compiled, "
        f"{room}: {verdict}",
        *_offload_line(estimate),
        *(f"memory alarm: {alarm}" for alarm in estimate.memory_alarms),
        *_advice(estimate),
    ]


def _bubble_line(estimate: StepEstimate) -> list[str]:
    if estimate.bubble is None:
        return []
    return [
        f"pipeline: {estimate.bubble:.1%} of a stage's turns are empty, which is in "
        "the step as time that others compute"
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
    """Suggests prefetching for units whose gathers are exposed over 5 % of the step."""
    ahead = {
        sent.collective.unit
        for sent in estimate.timeline.sent
        if "/prefetch/" in sent.collective.op_name
    }
    waits: dict[str, float] = {}
    for row in estimate.sent:
        if row.op == "all-gather" and row.unit in set(estimate.plan.units) - ahead:
            waits[row.unit] = waits.get(row.unit, 0.0) + row.exposed_seconds
    return [
        f"the gathers of '{unit}' are waited for, {seconds * 1e3:,.1f} ms a step: scan "
        "it with fsdp.scan(..., prefetch=1) to hide them"
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
