"""Plots an estimate: memory as stacked bars, the step as two lanes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_jax.planner._gpu import GPU
from fsdp_jax.planner._memory import Memory
from fsdp_jax.planner._timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE = {"forward": "#4477aa", "backward": "#66ccee", "optimizer": "#ccbb44"}
WIRE = {
    "all-gather": "#228833",
    "reduce-scatter": "#aa3377",
    "all-reduce": "#ee6677",
}
OTHER = "#bbbbbb"
MEMORY = "#4477aa #ccbb44 #aa3377 #228833 #66ccee #88ccaa #ee6677 #bbbbbb".split()


def draw_estimate(
    memory: Memory,
    compiled_bytes: int,
    gpu: GPU,
    timeline: Timeline,
    path: str | Path,
    *,
    title: str,
) -> None:
    """Saves the plot as PNG or SVG, chosen by the suffix of `path`.

    Args:
      memory: Predicted memory by kind.
      compiled_bytes: Peak bytes of the compiled step.
      gpu: GPU of the estimate.
      timeline: Replayed step.
      path: Output file.
      title: Title of the plot.

    Raises:
      ValueError: If matplotlib is not installed, or the suffix is neither.
    """
    figure = new_figure(path, 11, 5.8)
    figure.suptitle(title, fontsize=10)
    top, bottom = figure.subplots(2, 1, height_ratios=[1, 1.6])
    _draw_memory(top, memory, compiled_bytes, gpu)
    _draw_timeline(bottom, timeline)
    figure.savefig(path, dpi=130)


def new_figure(path: str | Path, width: float, height: float) -> Figure:
    """Returns an empty figure.

    Args:
      path: File that it will be saved to.
      width: Width in inches.
      height: Height in inches.

    Raises:
      ValueError: If matplotlib is not installed, or the suffix is neither .png nor
        .svg.
    """
    if Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"The name of the picture '{path}' must end in .png or .svg.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "Pictures are drawn by matplotlib: pip install 'fsdp-jax[notebook]'."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def _draw_memory(axes, memory: Memory, compiled_bytes: int, gpu: GPU) -> None:
    left = 0.0
    for (name, size), color in zip(
        dataclasses.asdict(memory).items(), MEMORY, strict=True
    ):
        width = size / 2**30
        axes.barh(1, width, left=left, color=color, label=f"{name} {width:.1f}")
        left += width
    axes.barh(0, compiled_bytes / 2**30, color="#dddddd", edgecolor="#666666")
    axes.axvline(gpu.memory / 2**30, color="black", linestyle=":")
    axes.set_yticks([0, 1], ["as compiled", "predicted"])
    axes.set_xlabel(f"GiB a GPU; the dotted line is all of {gpu.description}")
    axes.legend(ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_timeline(axes, timeline: Timeline) -> None:
    for name, color in COMPUTE.items():
        bars = [
            (span.start * 1e3, (span.end - span.start) * 1e3)
            for span in timeline.compute
            if span.name == name
        ]
        axes.broken_barh(bars, (1, 0.8), facecolors=color, label=name)
    ops = dict.fromkeys(sent.collective.op for sent in timeline.sent)
    for op in ops:
        runs = [sent for sent in timeline.sent if sent.collective.op == op]
        bars = [(run.start * 1e3, (run.end - run.start) * 1e3) for run in runs]
        axes.broken_barh(bars, (0, 0.8), facecolors=WIRE.get(op, OTHER), label=op)
    waits = [
        ((sent.end - sent.exposed) * 1e3, sent.exposed * 1e3)
        for sent in timeline.sent
        if sent.exposed
    ]
    axes.broken_barh(waits, (1, 0.8), facecolors="#ff2200", label="waits")
    axes.set_yticks([0.4, 1.4], ["communication", "compute"])
    axes.set_xlim(0, timeline.seconds * 1e3)
    axes.set_xlabel("ms of a step, as modelled")
    axes.legend(ncols=8, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
