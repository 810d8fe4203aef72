"""Models, plans and runs put together at random: what a case says.

A case is a few words and numbers, so that one that fails is replayed from a line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

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
    {"dp_shard": 1},
    {"dp_shard": 2},
    {"dp_shard": 3},
    {"dp_shard": 4},
    {"dp_outer": 2, "dp_shard": 1},
    {"dp_outer": 2, "dp_shard": 2},
    {"dp_outer": 2, "dp_shard": 3},
    {"dp_outer": 3, "dp_shard": 2},
    {"dp_shard": 2, "ep": 2},
    {"dp_shard": 1, "ep": 2},
    {"dp_outer": 2, "dp_shard": 1, "ep": 2},
    {"dp_outer": 2, "dp_shard": 2, "ep": 2},
    {"dp_shard": 2, "cp": 2},
    {"dp_outer": 2, "dp_shard": 1, "cp": 2},
    {"dp_shard": 2, "ep": 2, "cp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 1, "tp": 2},
    {"dp_outer": 2, "dp_shard": 1, "tp": 2},
    {"dp_outer": 2, "dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "ep": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2, "tp": 2},
    {"dp_shard": 2, "pp": 2},
    {"dp_outer": 2, "dp_shard": 1, "pp": 2},
    {"dp_shard": 1, "pp": 3},
    {"dp_shard": 2, "ep": 2, "pp": 2},
    {"dp_shard": 2, "cp": 2, "pp": 2},
    {"dp_shard": 2, "tp": 2, "pp": 2},
)
WRAPS = ("none", "vmap", "scan", "cond", "checkpoint", "custom_vjp", "jit")
SHARINGS = ("none", "tied", "shared", "nested", "repeated", "linked", "unused")
OPTIMIZERS = (
    *("sgd", "adamw", "adafactor", "clip", "plateau", "by_name", "layer_wise"),
)
NORMS = ("none", "none", "global", "own")
SOWN = ("none", "sow", "attribute")
REMATS = ("none", "none", "dots_saveable", "nothing_saveable")
MISUSES = ("none",) * 8 + ("flip", "cast", "penalty", "inner")
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "weights_float32": {"param_dtype": "float32"},
    "weights_bfloat16": {"param_dtype": "bfloat16"},
    "grads_float32": {"main_grads_dtype": "float32"},
    "comm_float32": {"grad_comm_dtype": "float32"},
    "comm_bfloat16_sums_wide": {
        "grad_comm_dtype": "bfloat16",
        "reduce_scatter_with_fp32_accumulation": True,
    },
}
"""What each passes to `MixedPrecisionPolicy`."""


@dataclasses.dataclass(frozen=True)
class Composition:
    """One model, one plan and one run.

    Attributes:
      framework: Library that the model is written in.
      width: Size of a layer; its inner size is one more, and divides by little.
      layers: Number of layers.
      layout: `unrolled`; `stacked` under the framework's own loop over layers; or
        `fsdp`, stacked under `fsdp_jax.scan`.
      prefetch: Option of `fsdp_jax.scan`.
      unroll: Option of `fsdp_jax.scan`.
      unit_prefetch: `FSDPConfig.prefetch`.
      sharing: Part of the model that is used more than once, or never.
      wrap: Transformation around units.
      around: `all` units at once, or `each` of them.
      dropout: Whether masks are drawn, from keys that are indexed by row.
      norm: BatchNorm in each layer: `none`, or with statistics of all rows (`global`)
        or of a rank's `own`.
      sow: How each layer adds to the loss: not at all, by what it sows, or by an
        attribute that it sets.
      buffer: Whether each layer has a table that is no parameter.
      closes_over: Whether units close over a traced value.
      aux: Whether the loss returns rows, means and counts beside it.
      per_token: Whether it returns a sum and a count that differs between ranks.
      bound_key: Whether a key is bound to its argument `key`.
      misuse: What the loss does with weights outside of their units; refused there.
      frozen: Parameters that are not trained: `none`, `head` or `bias`.
      strategy: One of `STRATEGIES`.
      placement: Index of the placements, if they are the case's own.
      mesh: Sizes of the axes that are named.
      reshard: `FSDPConfig.reshard_after_forward`.
      remat: Name of `FSDPConfig.remat_policy`.
      overlap: `FSDPConfig.overlap_outer`.
      replicated: Parameters that every device has: `none`, `bias` or `down`.
      min_shard_elements: Option of `FSDPConfig`.
      schedule: Name of the schedule of a pipeline.
      virtual_stages: Chunks of each of its stages.
      policy: One of `POLICIES`.
      num_microbatches: Number of microbatches.
      optimizer: One of `OPTIMIZERS`.
      rows_a_rank: Rows of a rank in one microbatch.
      by_hand: Whether gradients are computed outside of a step too.
      evaluates: Whether the loss after the last step is evaluated too.
      has_units: Whether the plan has any.
    """

    framework: str
    width: int
    layers: int
    layout: str
    prefetch: int
    unroll: int
    unit_prefetch: int
    sharing: str
    wrap: str
    around: str
    dropout: bool
    norm: str
    sow: str
    buffer: bool
    closes_over: bool
    aux: bool
    per_token: bool
    bound_key: bool
    misuse: str
    frozen: str
    strategy: str
    placement: int
    mesh: tuple[tuple[str, int], ...]
    reshard: bool
    remat: str
    overlap: bool
    replicated: str
    min_shard_elements: int
    schedule: Literal["1f1b", "gpipe"]
    virtual_stages: int
    policy: str
    num_microbatches: int
    optimizer: str
    rows_a_rank: int
    by_hand: bool
    evaluates: bool
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
    def returns_state(self) -> bool:
        """Whether the loss returns new arrays that are no parameters."""
        return self.norm != "none" and self.framework in ("linen", "equinox")

    @property
    def shows_aux(self) -> bool:
        """Whether a step, or a call by hand, shows what the loss returns beside it."""
        return self.aux and (self.by_hand or not self.returns_state)

    @property
    def ranks(self) -> int:
        """Ranks that the rows of a batch are split over."""
        return self.axes["dp_outer"] * self.axes["dp_shard"] * self.axes["ep"]
