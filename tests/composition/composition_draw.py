"""Draws compositions by number, such that a plan takes them.

Which words may not meet, and what takes their place, is in `_legal`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composition.compositions import (
    FRAMEWORKS,
    MESHES,
    MISUSES,
    NORMS,
    OPTIMIZERS,
    PLACEMENTS,
    POLICIES,
    REMATS,
    SHARINGS,
    SOWN,
    STRATEGIES,
    WRAPS,
    Composition,
)

Choose = Callable[[Sequence[Any]], Any]
"""Picks one of several."""


def case_of_seed(seed: int) -> Composition:
    """Draws a case by its number; frameworks and strategies take turns."""
    choose = random.Random(seed).choice
    strategies = tuple(STRATEGIES)
    strategy = strategies[seed % len(strategies)]
    framework = FRAMEWORKS[(seed + seed // len(strategies)) % len(FRAMEWORKS)]
    drawn = {"framework": framework, "strategy": strategy}
    for part in (_model, _use, _plan, _run):
        drawn |= part(choose, strategy)
    return Composition(**_legal(drawn))


def _model(choose: Choose, _: str) -> dict[str, Any]:
    return {
        "width": choose((4, 5, 6, 7, 8)),
        "layers": choose((2, 2, 3)),
        "layout": choose(("unrolled", "unrolled", "stacked", "fsdp", "fsdp")),
        "prefetch": choose((0, 1, 1, 2)),
        "unroll": choose((1, 1, 2)),
        "sharing": choose(SHARINGS),
        "dropout": choose((False, True)),
        "norm": choose(NORMS),
        "sow": choose(SOWN),
        "buffer": choose((False, False, True)),
        "closes_over": choose((False, False, True)),
    }


def _use(choose: Choose, _: str) -> dict[str, Any]:
    return {
        "wrap": choose(("none", "none", *WRAPS)),
        "around": choose(("all", "each")),
        "aux": choose((False, True)),
        "per_token": choose((False, False, True)),
        "bound_key": choose((False, False, False, True)),
        "misuse": choose(MISUSES),
    }


def _plan(choose: Choose, strategy: str) -> dict[str, Any]:
    return {
        "frozen": choose(("none", "none", "head", "bias")),
        "placement": choose(range(len(PLACEMENTS))),
        "mesh": tuple(choose(_meshes(strategy)).items()),
        "reshard": choose((True, True, True, False)),
        "remat": choose(REMATS),
        "unit_prefetch": choose((0, 1, 1, 2)),
        "overlap": choose((True, True, False)),
        "replicated": choose(("none", "none", "bias", "down")),
        "min_shard_elements": choose((0, 0, 20)),
        "schedule": choose(("1f1b", "gpipe")),
        "virtual_stages": choose((1, 2)),
        "policy": choose(("none",) * 6 + tuple(POLICIES)),
        "has_units": choose((True, True, True, True, False)),
    }


def _run(choose: Choose, _: str) -> dict[str, Any]:
    return {
        "num_microbatches": choose((1, 2, 2, 3)),
        "optimizer": choose(OPTIMIZERS),
        "rows_a_rank": choose((1, 2)),
        "by_hand": choose((False, False, True)),
        "evaluates": choose((False, False, True)),
    }


def _meshes(strategy: str) -> list[Mapping[str, int]]:
    if strategy not in ("hfsdp", "placed"):
        return list(MESHES)
    return [m for m in MESHES if m.get("dp_outer", 1) > 1]


def _legal(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, without what no plan takes or what has no meaning."""
    for rule in (_by_mesh, _by_framework, _by_layout, _by_writes, _by_numbers):
        fields = {**fields, **rule(fields)}
    return fields


def _by_mesh(f: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    axes = dict(f["mesh"])
    if "pp" in axes:
        changes |= {"framework": "plain", "layout": "fsdp", "has_units": True}
        changes |= {"wrap": "none", "sharing": "tied", "per_token": False}
        changes |= {"frozen": "none", "sow": "none", "misuse": "none"}
    else:
        changes |= {"schedule": "1f1b", "virtual_stages": 1}
    if "tp" in axes:  # XLA:CPU aborts where narrow collectives meet automatic axes.
        changes |= {"width": f["width"] // 2 * 2, "policy": "none"}
    # On one device rows of a rank are all rows; on cp a rank has parts of rows.
    if f["norm"] == "own" and ("cp" in axes or math.prod(axes.values()) > 4):
        changes["norm"] = "global"
    return changes


def _by_framework(f: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    framework, layout = f["framework"], f["layout"]
    if f["wrap"] == "custom_vjp" and framework != "plain":
        changes["wrap"] = "checkpoint"
    if framework == "linen":  # A module is called by flax's transformations alone.
        changes |= {"around": "all"}
        layout = changes["layout"] = "stacked" if layout == "fsdp" else layout
    if f["sharing"] == "unused" and framework == "linen":
        changes["sharing"] = "none"
    if f["sharing"] == "linked" and (framework != "nnx" or layout != "unrolled"):
        changes["sharing"] = "tied"
    # nnx.scan takes no module that another transformation closes over.
    if framework == "nnx" and f["wrap"] != "none" and layout == "stacked":
        layout = changes["layout"] = "fsdp"
    if framework not in ("nnx", "linen"):
        changes["buffer"] = False
    # A rule of derivatives, and a scan, differentiate by their arguments alone.
    if framework != "plain" or layout == "fsdp" or f["wrap"] == "custom_vjp":
        changes["closes_over"] = False
    # Without units all of these but a flip has another meaning on several ranks.
    is_refused = f["has_units"] or f["misuse"] == "flip"
    if framework != "plain" or not is_refused:
        changes["misuse"] = "none"
    return changes


def _by_layout(f: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if f["layout"] != "fsdp":
        changes |= {"prefetch": 0, "unroll": 1}
    if f["layout"] != "unrolled" or f["wrap"] == "none":
        changes["around"] = "all"
    if f["sharing"] == "nested" and f["layout"] != "unrolled":
        changes["sharing"] = "none"
    if not (f["has_units"] and f["reshard"]):
        changes |= {"prefetch": 0, "remat": "none"}
    if not f["has_units"]:
        changes |= {"reshard": True, "unit_prefetch": 0}
    return changes


def _by_writes(f: dict[str, Any]) -> dict[str, Any]:
    """A module's writes do not leave a transformation that it is closed over by."""
    changes: dict[str, Any] = {}
    framework, layout = f["framework"], f["layout"]
    is_wrapped, is_repeated = f["wrap"] != "none", f["sharing"] == "repeated"
    if framework == "plain" or is_wrapped or is_repeated:
        changes["norm"] = "none"
    if framework == "equinox" and layout != "unrolled":
        changes["norm"] = "none"
    if framework == "nnx" and (is_wrapped or layout != "unrolled"):
        changes["sow"] = "none"
    elif framework == "nnx" and is_repeated and f["sow"] == "sow":
        changes["sow"] = "attribute"
    if framework != "nnx" and f["sow"] == "attribute":
        changes["sow"] = "sow"
    return changes


def _by_numbers(f: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if f["per_token"]:  # A layer's own loss is a mean over rows, not over tokens.
        changes["sow"] = "none"
    # What divides by the size of each gradient amplifies rounding, and so do steps
    # that are as large as these get: `clip` divides by their size altogether.
    if f["policy"] != "none":
        changes |= {"optimizer": "clip", "norm": "none"}
    if f["optimizer"] == "adafactor":
        changes["norm"] = "none"
    if f["strategy"] != "placed":
        changes["placement"] = 0
    return changes
