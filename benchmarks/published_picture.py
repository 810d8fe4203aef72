"""Draws predicted against published step times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from published_errors import Compared

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def draw(rows: Sequence[Compared], path: str | Path) -> None:
    """Saves a plot with a dot a row, filled where it was held back from the fit.

    The same rows give the same bytes, so that a new report changes its picture only
    where a prediction changed.

    Args:
      rows: Published steps with their predictions.
      path: File of the plot, an SVG.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6.5), layout="constrained")
    axes = figure.subplots()
    sources = sorted({one.row["source"] for one in rows})
    for source, color in zip(sources, COLORS * 3, strict=False):
        found = [one for one in rows if one.row["source"] == source]
        is_test = found[0].row["split"] == "test"
        axes.scatter(
            [float(one.row["step_s"]) for one in found],
            [one.seconds for one in found],
            s=22,
            color=color if is_test else "none",
            edgecolors=color,
            label=f"{_short(source)} ({found[0].row['split']})",
        )
    ends = (0.4, 150)
    for factor, style in ((1.0, "-"), (1.1, ":"), (1 / 1.1, ":")):
        axes.plot(ends, [end * factor for end in ends], style, color="#666666", lw=1)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("published seconds a step")
    axes.set_ylabel("predicted seconds a step; dotted: 10 % off")
    axes.set_title("Published training steps and the planner's predictions")
    axes.legend(fontsize=7)
    # Names of shapes are random without a salt, and a date is written by default.
    with rc_context({"svg.hashsalt": "fsdp_jax"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _short(source: str) -> str:
    repository, _, path = source.partition(":")
    return f"{repository.split('@')[0]} {Path(path.split(' ')[0]).name}"[:60]
