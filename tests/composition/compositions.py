"""Models, plans and runs put together at random: what a case says, and how it is drawn.

A case is a few words and numbers, so that one that fails is replayed from a line. Cases
are drawn such that a plan takes them: what two words may not meet is in `_legal`.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from typing import Any

FRAMEWORKS = ("plain", "nnx", "linen", "equinox")

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"zero_dp_strategy": 0},
    "zero1": {"zero_dp_strategy": 1},
    "zero2": {"zero_dp_strategy": 2},
    "zero3": {"zero_dp_strategy": 3},
    "hfsdp": {"outer_dp_sharding_strategy": 1},
    "placed": {},
}
"""What each passes to `FSDPConfig`; `placed` has placements of the case's own."""

PLACEMENTS = (
    (("dp_shard", "dp_outer"),) * 3,
    (("dp_outer",), ("dp_outer",), ("dp_outer", "dp_shard")),
    ((), ("dp_shard",), ("dp_shard", "dp_outer")),
    ((), (), ("dp_outer",)),
)
"""Axes of parameter, gradient and optimizer."""

MESHES: tuple[Mapping[str, int], ...] = (
    {"dp_shard": 2},
    {"dp_shard": 3},
    {"dp_shard": 4},
    {"dp_outer": 2, "dp_shard": 1},
    {"dp_outer": 2, "dp_shard": 2},
    {"dp_outer": 2, "dp_shard": 3},
    {"dp_outer": 3, "dp_shard": 2},
    {"dp_shard": 2, "ep": 2},
    {"dp_shard": 2, "cp": 2},
    {"dp_outer": 2, "dp_shard": 1, "cp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_outer": 2, "dp_shard": 1, "tp": 2},
    {"dp_shard": 2, "pp": 2},
    {"dp_outer": 2, "dp_shard": 1, "pp": 2},
)
WRAPS = ("none", "vmap", "scan", "cond", "checkpoint", "custom_vjp", "jit")
SHARINGS = ("none", "tied", "shared", "nested", "repeated")
OPTIMIZERS = ("sgd", "adamw", "adafactor", "clip")
POLICIES = ("none", "none", "none", "float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Composition:
    """One model, one plan and one run.

    Attributes:
      framework: What the model is written in.
      width: Of a layer; its inner width is one more, and divides by little.
      layers: How many.
      layout: `unrolled`, or `stacked` under the framework's own loop over layers, or
        `fsdp`, stacked under `fsdp_jax.scan`.
      prefetch: Of `fsdp_jax.scan`.
      unroll: Of `fsdp_jax.scan`.
      sharing: What of the model is used more than once.
      wrap: The transformation around all of its units.
      dropout: Masks from keys that are indexed by row.
      norm: BatchNorm in each layer.
      sow: Each layer adds to the loss.
      aux: The loss returns rows, means and counts beside it.
      per_token: It returns a sum and a count that differs between ranks.
      frozen: Which parameters are not trained: `none`, `head` or `bias`.
      strategy: One of `STRATEGIES`.
      placement: Number of the placements, if they are the case's own.
      mesh: Sizes of the axes that are named.
      reshard: `FSDPConfig.reshard_after_forward`.
      overlap: `FSDPConfig.overlap_outer`.
      policy: The dtype that weights are cast to.
      num_microbatches: Microbatches.
      optimizer: One of `OPTIMIZERS`.
      rows_a_rank: Of one microbatch.
      has_units: Whether the plan has any.
    """

    framework: str
    width: int
    layers: int
    layout: str
    prefetch: int
    unroll: int
    sharing: str
    wrap: str
    dropout: bool
    norm: bool
    sow: bool
    aux: bool
    per_token: bool
    frozen: str
    strategy: str
    placement: int
    mesh: tuple[tuple[str, int], ...]
    reshard: bool
    overlap: bool
    policy: str
    num_microbatches: int
    optimizer: str
    rows_a_rank: int
    has_units: bool

    def to_json(self) -> str:
        """Returns the case as one line, for `composition_fuzz.py --case`."""
        return json.dumps({**dataclasses.asdict(self), "mesh": dict(self.mesh)})

    @staticmethod
    def from_json(text: str) -> Composition:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        return Composition(**{**fields, "mesh": tuple(fields["mesh"].items())})

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh's axes; 1 for those that are not named."""
        ones = dict.fromkeys(("pp", "dp_outer", "dp_shard", "ep", "cp", "tp"), 1)
        return ones | dict(self.mesh)

    @property
    def ranks(self) -> int:
        """Ranks that the rows of a batch are split over."""
        return self.axes["dp_outer"] * self.axes["dp_shard"] * self.axes["ep"]


def case_of_seed(seed: int) -> Composition:
    """Draws a case by its number; frameworks and strategies take turns."""
    choose = random.Random(seed).choice
    strategies = tuple(STRATEGIES)
    strategy = strategies[seed % len(strategies)]
    framework = FRAMEWORKS[(seed + seed // len(strategies)) % len(FRAMEWORKS)]
    fields = {
        "framework": framework,
        "width": choose((4, 5, 6, 7, 8)),
        "layers": choose((2, 2, 3)),
        "layout": choose(("unrolled", "stacked", "fsdp", "fsdp")),
        "prefetch": choose((0, 1, 1, 2)),
        "unroll": choose((1, 1, 2)),
        "sharing": choose(SHARINGS),
        "wrap": choose(("none", "none", *WRAPS)),
        "dropout": choose((False, True)),
        "norm": choose((False, False, True)),
        "sow": choose((False, True)),
        "aux": choose((False, True)),
        "per_token": choose((False, False, True)),
        "frozen": choose(("none", "none", "head", "bias")),
        "strategy": strategy,
        "placement": choose(range(len(PLACEMENTS))),
        "mesh": tuple(choose(_meshes(strategy)).items()),
        "reshard": choose((True, True, True, False)),
        "overlap": choose((True, True, False)),
        "policy": choose(POLICIES),
        "num_microbatches": choose((1, 2, 2, 3)),
        "optimizer": choose(OPTIMIZERS),
        "rows_a_rank": choose((1, 2)),
        "has_units": choose((True, True, True, True, False)),
    }
    return Composition(**_legal(fields))


def _meshes(strategy: str) -> list[Mapping[str, int]]:
    if strategy not in ("hfsdp", "placed"):
        return list(MESHES)
    return [m for m in MESHES if m.get("dp_outer", 1) > 1 and not {"cp", "pp"} & {*m}]


def _legal(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, without what no plan takes or what has no meaning."""
    for rule in (_by_framework, _by_layout, _by_mesh, _by_numbers):
        fields = {**fields, **rule(fields)}
    return fields


def _by_framework(f: dict[str, Any]) -> dict[str, Any]:
    """A module's writes do not leave a transformation that it is closed over by."""
    changes: dict[str, Any] = {}
    is_module = f["framework"] in ("nnx", "equinox")
    if f["wrap"] == "custom_vjp" and f["framework"] != "plain":
        changes["wrap"] = "checkpoint"
    if f["framework"] == "plain":
        changes["norm"] = False
    if f["framework"] == "linen" and f["layout"] == "fsdp":
        changes["layout"] = "stacked"
    if f["norm"] and (f["wrap"] != "none" or f["sharing"] == "repeated"):
        changes["norm"] = False
    if f["framework"] == "nnx" and f["wrap"] != "none":
        changes["sow"] = False
    if f["sharing"] == "repeated" and f["framework"] == "nnx":
        changes["sow"] = False
    if is_module and f["layout"] != "unrolled":
        changes |= {"norm": False, "sow": f["sow"] and f["framework"] == "equinox"}
    return changes


def _by_layout(f: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if f["layout"] != "fsdp":
        changes |= {"prefetch": 0, "unroll": 1}
    if f["sharing"] == "nested" and f["layout"] != "unrolled":
        changes["sharing"] = "none"
    if not (f["has_units"] and f["reshard"]):
        changes["prefetch"] = 0
    if not f["has_units"]:
        changes["reshard"] = True
    return changes


def _by_mesh(f: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    axes = dict(f["mesh"])
    if "pp" in axes:
        changes |= {"framework": "plain", "layout": "fsdp", "has_units": True}
        changes |= {"wrap": "none", "sharing": "tied", "per_token": False}
        changes |= {"norm": False, "frozen": "none", "sow": False}
    if "tp" in axes:  # XLA:CPU aborts where narrow collectives meet automatic axes.
        changes |= {"width": f["width"] // 2 * 2, "policy": "none"}
    return changes


def _by_numbers(f: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if f["per_token"]:  # A layer's own loss is a mean over rows, not over tokens.
        changes["sow"] = False
    if f["policy"] != "none":  # What divides by a gradient's size amplifies rounding.
        changes |= {"optimizer": "sgd", "norm": False}
    if f["optimizer"] == "adafactor":
        changes["norm"] = False
    if f["strategy"] != "placed":
        changes["placement"] = 0
    return changes
