"""What is sharded, where, and what it costs: a plan is data, and prints as a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax._config import FSDPConfig, Precision
from fsdp_jax._mesh import BATCH_AXES, num_devices
from fsdp_jax._model import MakeModel, ModelDef
from fsdp_jax._table import format_bytes, text_table
from fsdp_jax._tree import PyTree

ROOT = "(root)"
"""The unit of whatever belongs to no other: gathered once, at the entry of the loss."""


@dataclasses.dataclass(frozen=True)
class Placements:
    """The mesh axes that split one parameter, at each station of its life.

    Attributes:
      parameter: Within a step, between its uses.
      gradient: Within a step, while gradients accumulate over microbatches.
      optimizer: Between steps and while the optimizer updates it: the only copy, in the
        main dtype. Where a model computes with more of it, that is made from this one
        when the step begins, so no second copy can disagree with it.

    Source: Megatron-FSDP `experimental::Placements` (one placement a mesh axis there;
      here the axes that shard, the others being replicated or, for gradients, partial).
    """

    parameter: tuple[str, ...]
    gradient: tuple[str, ...]
    optimizer: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ParamPlan:
    """One parameter: a row of the plan.

    Attributes:
      name: Dotted path.
      shape: Logical shape, stack dims included.
      unit: Path of its unit, or `ROOT`.
      num_stacked: Leading dims that are the stack of its unit.
      dim: The dim that is split, or None if it stays whole.
      placements: The mesh axes that split that dim.
      precision: Its dtypes.
      reshard: Whether its unit is gathered again for backward.
      remat_policy: What of its unit's activations is saved, see `FSDPConfig`.
    """

    name: str
    shape: tuple[int, ...]
    unit: str
    num_stacked: int
    dim: int | None
    placements: Placements
    precision: Precision
    reshard: bool
    remat_policy: Callable[..., bool] | None

    @property
    def ndim_in_unit(self) -> int:
        """Dims of the slice that its unit computes with."""
        return len(self.shape) - self.num_stacked

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """The spec that splits `dim` over `axes`."""
        if self.dim is None or not axes:
            return PartitionSpec()
        # One axis as its name: jax takes P("x") and P(("x",)) for different specs.
        split = axes if len(axes) > 1 else "".join(axes)
        return PartitionSpec(*(None,) * self.dim, split)

    def num_elements(self, mesh: Mesh, axes: tuple[str, ...]) -> int:
        """Elements of it on one device when split over `axes`."""
        return math.prod(self.shape) // num_devices(mesh, axes)


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Which device holds what of a model; nothing in it is an array.

    Made by `fully_shard`; every function that acts takes it. `print(plan)` shows one
    row a parameter and the bytes a device.

    Attributes:
      mesh: The device mesh.
      config: The `FSDPConfig` it was made with.
      make_model: The user's own function, from a PRNG key to a model.
      model: The model without its arrays.
      rows: One `ParamPlan` a parameter, in the order of `jax.tree.leaves(params)`.
      unit_classes: Classes whose `__call__` is a unit.
    """

    mesh: Mesh
    config: FSDPConfig
    make_model: MakeModel
    model: ModelDef
    rows: tuple[ParamPlan, ...]
    unit_classes: tuple[type, ...]

    @property
    def params(self) -> PyTree:
        """The mould of the parameters: shapes, main dtypes and shardings at rest."""
        return self._mould(
            lambda row: (row.precision.main_params, row.placements.optimizer)
        )

    @property
    def grads(self) -> PyTree:
        """The mould of the gradients as `value_and_grad` returns them."""
        return self._mould(
            lambda row: (row.precision.main_grads, row.placements.optimizer)
        )

    @property
    def model_state(self) -> PyTree:
        """The mould of the arrays that are no parameters; whole on every device."""
        return jax.tree.map(
            lambda leaf: self._struct(leaf.shape, leaf.dtype, PartitionSpec()),
            self.model.state,
        )

    @property
    def has_keys(self) -> bool:
        """Whether the model carries PRNG keys, as dropout does."""
        return any(
            jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            for leaf in jax.tree.leaves(self.model.state)
        )

    @property
    def specs(self) -> PyTree:
        """A `PartitionSpec` a parameter, at rest."""
        return jax.tree.map(lambda leaf: leaf.sharding.spec, self.params)

    @property
    def shardings(self) -> PyTree:
        """A `NamedSharding` a parameter, at rest."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.params)

    @property
    def batch_sharding(self) -> NamedSharding:
        """How a batch lies: its first dim split over the data axes of the mesh."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    @property
    def units(self) -> tuple[str, ...]:
        """Paths of the units, in order of appearance, without the root."""
        return tuple(dict.fromkeys(r.unit for r in self.rows if r.unit != ROOT))

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes on one device for the parameters and the gradients, at rest."""
        sizes = {"params": 0, "grads": 0}
        for row in self.rows:
            held = row.num_elements(self.mesh, row.placements.optimizer)
            sizes["params"] += held * row.precision.main_params.itemsize
            sizes["grads"] += held * row.precision.main_grads.itemsize
        return sizes

    def __repr__(self) -> str:
        """The table: one row a parameter, then the mesh and the bytes a device."""
        table = text_table(_COLUMNS, [_cells(self, row) for row in self.rows])
        return "\n".join([table, "", *_summary(self)])

    def _mould(
        self, of: Callable[[ParamPlan], tuple[jnp.dtype, tuple[str, ...]]]
    ) -> PyTree:
        structs = []
        for row in self.rows:
            dtype, axes = of(row)
            structs.append(self._struct(row.shape, dtype, row.spec(axes)))
        return jax.tree.structure(self.model.params).unflatten(structs)

    def _struct(self, shape, dtype, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(self.mesh, spec)
        )


_COLUMNS = {
    "parameter": "left",
    "shape": "right",
    "rests as": "left",
    "gathered as": "left",
    "unit": "left",
    "split": "left",
    "bytes/device": "right",
}


def _cells(plan: Plan, row: ParamPlan) -> tuple[str, ...]:
    axes = row.placements.optimizer
    rests, moves = row.precision.main_params, row.precision.param
    return (
        row.name,
        str(row.shape),
        rests.name,
        moves.name,
        row.unit + (" (stacked)" if row.num_stacked else ""),
        "whole" if not axes else f"dim {row.dim} over {' x '.join(axes)}",
        f"{row.num_elements(plan.mesh, axes) * rests.itemsize:,}",
    )


def _largest_unit(plan: Plan) -> int:
    """Bytes of the largest unit's whole weights as computed with, one of a stack."""
    sizes = dict.fromkeys(plan.units, 0)
    for row in plan.rows:
        if row.unit != ROOT:
            elements = math.prod(row.shape[row.num_stacked :])
            sizes[row.unit] += elements * row.precision.param.itemsize
    return max(sizes.values(), default=0)


def _summary(plan: Plan) -> list[str]:
    sizes = plan.bytes_per_device
    axes = ", ".join(f"{a}={n}" for a, n in plan.mesh.shape.items() if n > 1)
    whole = [row.name for row in plan.rows if not row.placements.optimizer]
    at_entry = sum(
        math.prod(row.shape) * row.precision.param.itemsize
        for row in plan.rows
        if row.unit == ROOT
    )
    counts = f"parameters: {len(plan.rows)}, units: {len(plan.units)}"
    at_rest = [f"{format_bytes(size)} {kind}" for kind, size in sizes.items()]
    lines = [
        f"{counts}, devices: {plan.mesh.size} ({axes or 'a single one'})",
        f"a device at rest: {', '.join(at_rest)}; optimizer state comes on top",
        f"whole during a step: {format_bytes(at_entry)} in no unit, all the time; "
        f"{format_bytes(_largest_unit(plan))} in the largest unit, while it runs",
    ]
    if whole and plan.mesh.size > 1:
        lines.append(f"whole on every device: {', '.join(whole)}")
    if not plan.units:
        lines.append(
            "no units: the whole model is gathered at the entry of the loss; pass "
            "units=[LayerClass] to gather a layer at a time"
        )
    return lines
