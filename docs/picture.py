"""Draws the picture of the README and of the home page, from plans and a benchmark.

    python docs/picture.py [--check]

The bytes are those of Llama-3 8B's plans on eight devices; the shards those of one of
its matrices on four; the exposed communication is what `benchmarks/overlap.py` found
for eight H200s.
For the home page each of its parts is a picture of its own, that fits a telephone, for
light and for dark pages. A PNG of the whole is what other sites show beside a link.
`--check` draws nothing, and says whether the pictures show today's numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import social_card
from flax import nnx
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, DecoderLayer

HERE = Path(__file__).parent
PICTURE = HERE / "pages" / "fsdp_jax.svg"
CARD = HERE / "pages" / social_card.PICTURE
# By the ending of a picture's name: the colour of its text.
THEMES = {"light": "#222222", "dark": "#dddddd"}
OVERLAP = HERE.parent / "benchmarks" / "results" / "overlap_8_jax0.10.2.json"

LLAMA_3_8B = DecoderConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
STRATEGIES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
FORMS = {
    "annotations": "annotations alone",
    "plain_scan": "gather in a scan",
    "fsdp_jax": "fsdp.scan(prefetch=1)",
}
DEVICES = ("#4477aa", "#228833", "#ccbb44", "#aa3377")
PARTS = ("bfloat16 weights", "gradients", "main weights, AdamW")
COLORS = ("#4477aa", "#66ccee", "#ccbb44")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the picture shows.

    Attributes:
      rows: First and last row of a matrix that each of four devices holds.
      gib: By strategy, GiB a device of `PARTS`.
      waits: By form of a step: milliseconds of computation, and of exposed
        communication.
    """

    rows: list[tuple[int, int]]
    gib: dict[str, tuple[float, ...]]
    waits: dict[str, tuple[float, float]]

    def labels(self) -> list[str]:
        """Every number in the picture, as it is written there."""
        shards = [f"rows {first}-{last}" for first, last in self.rows]
        sizes = [f"{sum(parts):.1f} GiB" for parts in self.gib.values()]
        waits = [
            f"{exposed:.0f} of {compute + exposed:.0f} ms"
            for compute, exposed in self.waits.values()
        ]
        return shards + sizes + waits


def find_facts(devices: Sequence[Any]) -> Facts:
    """From the plans for these eight devices, and the benchmark."""
    measured = json.loads(OVERLAP.read_text())["rows"]
    single = {row["form"]: row for row in measured if row["microbatches"] == 1}
    return Facts(
        rows=_rows(devices[:4]),
        gib={
            name: _gib(_plan(devices, strategy))
            for strategy, name in enumerate(STRATEGIES)
        },
        waits={
            form: (single[form]["step_ms"] - exposed, exposed)
            for form in FORMS
            for exposed in [single[form]["exposed_ms"]]
        },
    )


def _plan(devices: Sequence[Any], strategy: int) -> fsdp.Plan:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    return fsdp.fully_shard(
        lambda key: Decoder(LLAMA_3_8B, rngs=nnx.Rngs(key), scan=fsdp.scan),
        fsdp.make_mesh(devices=devices),
        units=[DecoderLayer],
        config=fsdp.FSDPConfig(zero_dp_strategy=strategy, mp_policy=policy),
    )


def _rows(devices: Sequence[Any]) -> list[tuple[int, int]]:
    head = _plan(devices, 3).params["lm_head"]["kernel"]
    slices = head.sharding.devices_indices_map(head.shape)
    bounds = [slices[device][0].indices(head.shape[0]) for device in devices]
    return [(start, stop - 1) for start, stop, _ in bounds]


def _gib(plan: fsdp.Plan) -> tuple[float, ...]:
    """Weights unsharded for the whole step, gradients, and stored parameters."""
    axes = plan.placements
    whole = not axes.parameter
    weights = (
        sum(param.num_elements(plan.mesh, ()) for param in plan.param_plans) * 2 * whole
    )
    grads = sum(
        param.num_elements(plan.mesh, axes.gradient)
        * param.precision.main_grads.itemsize
        for param in plan.param_plans
    )
    main = sum(
        param.num_elements(plan.mesh, axes.optimizer)
        * param.precision.main_params.itemsize
        for param in plan.param_plans
    )
    # AdamW's two moments are of the main weights' shape and dtype.
    return tuple(size / 2**30 for size in (weights, grads, 3 * main))


def panels(facts: Facts) -> dict[str, Callable[[Axes], None]]:
    """What draws each part of the picture."""
    labels = facts.labels()
    rows, sizes = len(facts.rows), len(facts.gib)
    return {
        "shards": partial(_draw_shards, labels=labels[:rows]),
        "bytes": partial(_draw_bytes, facts=facts, labels=labels[rows : rows + sizes]),
        "waits": partial(_draw_waits, facts=facts, labels=labels[rows + sizes :]),
    }


def draw(facts: Facts) -> None:
    """Writes the pictures, the same bytes for the same facts."""
    fixed = {"svg.fonttype": "none", "svg.hashsalt": "fsdp_jax"}
    with rc_context(fixed):
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        parts = figure.subplots(1, 3, width_ratios=[1.05, 1, 1])
        for axes, draw_panel in zip(parts, panels(facts).values(), strict=True):
            draw_panel(axes)
        _save(figure, PICTURE)
    for theme, color in THEMES.items():
        names = ("text.color", "xtick.color", "ytick.color")
        with rc_context(fixed | dict.fromkeys(names, color)):
            for name, draw_panel in panels(facts).items():
                figure = Figure(figsize=(4.6, 3.2), layout="constrained")
                draw_panel(figure.subplots())
                _save(figure, _panel(name, theme), transparent=True)
    _draw_card(facts)


def _draw_card(facts: Facts) -> None:
    """Draws the picture in the 1200 x 630 pixels of a social card, below a title."""
    figure = Figure(figsize=(12, 6.3), dpi=100)
    says = "Fully sharded data parallelism for your JAX model"
    figure.text(0.05, 0.86, "fsdp_jax", fontsize=42, weight="bold", color=COLORS[0])
    figure.text(0.05, 0.77, says, size=21)
    parts = figure.subplots(1, 3, width_ratios=[1.05, 1, 1])
    for axes, draw_panel in zip(parts, panels(facts).values(), strict=True):
        draw_panel(axes)
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.12, top=0.62, wspace=0.4)
    # In text beside the pixels, so that `--check` can read them.
    figure.savefig(CARD, metadata={"Description": "; ".join(facts.labels())})


def _panel(name: str, theme: str) -> Path:
    return PICTURE.with_stem(f"{PICTURE.stem}_{name}_{theme}")


def _save(figure: Figure, path: Path, **options: Any) -> None:
    figure.savefig(path, metadata={"Date": None, "Creator": None}, **options)


def _draw_shards(axes: Axes, *, labels: list[str]) -> None:
    count = len(labels)
    for device, (color, label) in enumerate(zip(DEVICES, labels, strict=True)):
        y = count - 1 - device
        axes.barh(y, 3, color=color, height=0.8)
        ink = "black" if color == "#ccbb44" else "white"  # White on yellow is faint.
        axes.text(1.5, y, label, ha="center", va="center", color=ink, fontsize=7)
        for part, other in enumerate(DEVICES):
            axes.barh(y, 0.55, left=5 + 0.55 * part, color=other, height=0.8)
        axes.barh(y, 1.6, left=9, color="#dddddd", height=0.8)
        axes.barh(y, 0.4, left=9 + 0.4 * device, color=color, height=0.8)
    for x, arrow in ((3.1, "gather"), (7.3, "reduce-\nscatter")):
        axes.annotate(
            "",
            (x + 1.7, 1.5),
            (x, 1.5),
            arrowprops={"arrowstyle": "->", "lw": 1.5, "color": rcParams["text.color"]},
        )
        axes.text(x + 0.85, 1.68, arrow, ha="center", fontsize=8)
    axes.set_yticks(range(count), [f"GPU {count - 1 - y}" for y in range(count)])
    axes.set_xticks([1.5, 6.1, 9.8], ["stored", "while its\nlayer runs", "gradients"])
    _bare(axes, "A matrix of Llama-3 8B on four devices")


def _draw_bytes(axes: Axes, *, facts: Facts, labels: list[str]) -> None:
    names = list(facts.gib)
    left = [0.0] * len(names)
    for part, (name, color) in enumerate(zip(PARTS, COLORS, strict=True)):
        widths = [sizes[part] for sizes in facts.gib.values()]
        axes.barh(names, widths, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, (x, label) in enumerate(zip(left, labels, strict=True)):
        axes.text(x + 2, y, label, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.25)
    axes.set_xticks([])
    axes.legend(fontsize=7, loc="lower right", frameon=False)
    _bare(axes, "What a step keeps, GiB on each of eight GPUs")


def _draw_waits(axes: Axes, *, facts: Facts, labels: list[str]) -> None:
    names = [FORMS[form] for form in facts.waits]
    compute = [a for a, _ in facts.waits.values()]
    exposed = [b for _, b in facts.waits.values()]
    axes.barh(names, compute, color="#4477aa", label="computes")
    axes.barh(
        names, exposed, left=compute, color="#ee6677", label="exposed communication"
    )
    for y, (a, b, label) in enumerate(zip(compute, exposed, labels, strict=True)):
        axes.text(a + b + 10, y, label, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(map(sum, facts.waits.values())) * 1.35)
    axes.set_xticks([])
    below = {"loc": "lower center", "bbox_to_anchor": (0.5, -0.12), "ncols": 2}
    axes.legend(fontsize=7, frameon=False, **below)
    _bare(axes, "A step on eight H200s, as modelled")


def _bare(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def outdated(facts: Facts) -> list[str]:
    """The numbers that the pictures should show and do not."""
    found = []
    of_themes = [[_panel(name, theme) for name in panels(facts)] for theme in THEMES]
    for pictures in ([PICTURE], *of_themes):
        text = "".join(path.read_text() for path in pictures if path.exists())
        found += [label for label in facts.labels() if f">{label}<" not in text]
    if not CARD.exists() or "; ".join(facts.labels()).encode() not in CARD.read_bytes():
        found.append(CARD.name)
    return found


def main() -> int:
    """Draws, or checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    facts = find_facts(jax.devices())
    if not check:
        draw(facts)
    missing = outdated(facts)
    print("\n".join(missing) or f"{PICTURE} shows what is.")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
