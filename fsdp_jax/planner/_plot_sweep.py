"""Plots a sweep: time and memory of each variant, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fsdp_jax.planner._plot import new_figure

_COMPUTE, _EXPOSED, _MEMORY, _TOO_MUCH = "#4477aa", "#ff2200", "#66ccee", "#ee6677"


@dataclasses.dataclass(frozen=True)
class Bar:
    """One variant.

    Attributes:
      name: Name of the variant.
      seconds: Seconds of a step.
      exposed: Seconds of these in which communication is waited for.
      range: Lowest and highest seconds of a step.
      memory: Bytes that a GPU needs.
      fits: Whether it has them.
    """

    name: str
    seconds: float
    exposed: float
    range: tuple[float, float]
    memory: int
    fits: bool


def draw_sweep(
    bars: Sequence[Bar], memory: int, path: str | Path, *, title: str
) -> None:
    """Saves the plot as PNG or SVG, chosen by the suffix of `path`.

    Args:
      bars: Variants, from the top.
      memory: Bytes of a GPU's memory.
      path: Output file.
      title: Title of the plot.

    Raises:
      ValueError: If matplotlib is not installed, or the suffix is neither.
    """
    figure = new_figure(path, 11, 1.6 + 0.4 * len(bars))
    figure.suptitle(title, fontsize=10)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.6, 1])
    _draw_times(left, bars)
    _draw_memory(right, bars, memory)
    figure.savefig(path, dpi=130)


def _draw_times(axes, bars: Sequence[Bar]) -> None:
    places = range(len(bars))
    computing = [(bar.seconds - bar.exposed) * 1e3 for bar in bars]
    waiting = [bar.exposed * 1e3 for bar in bars]
    off = [
        [(bar.seconds - bar.range[0]) * 1e3 for bar in bars],
        [(bar.range[1] - bar.seconds) * 1e3 for bar in bars],
    ]
    axes.barh(places, computing, color=_COMPUTE, label="computes")
    axes.barh(places, waiting, left=computing, color=_EXPOSED, label="waits")
    whole = [bar.seconds * 1e3 for bar in bars]
    axes.errorbar(whole, places, xerr=off, fmt="none", color="black", capsize=3)
    axes.set_yticks(places, [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step, as modelled, with the range of estimates")
    axes.legend(ncols=2, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_memory(axes, bars: Sequence[Bar], memory: int) -> None:
    colors = [_MEMORY if bar.fits else _TOO_MUCH for bar in bars]
    sizes = [bar.memory / 2**30 for bar in bars]
    axes.barh(range(len(bars)), sizes, color=colors)
    axes.axvline(memory / 2**30, color="black", linestyle=":")
    axes.set_xlabel("GiB a GPU; the dotted line is all of its memory")
