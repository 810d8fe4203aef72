"""What is sharded, where, and what it costs: a plan is data, and prints as a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax._config import FSDPConfig, Placements, Precision
from fsdp_jax._low_precision import MXFP8Gather, ParamGather, num_blocks
from fsdp_jax._mesh import BATCH_AXES, DATA_AXES, axes_in_use, num_devices
from fsdp_jax._model import MakeModel, ModelDef
from fsdp_jax._padded import Padded
from fsdp_jax._table import format_bytes, text_table
from fsdp_jax._tree import PyTree

ROOT = "(root)"
"""The unit of whatever belongs to no other: gathered once, at the entry of the loss."""


@dataclasses.dataclass(frozen=True)
class ParamPlan:
    """One parameter: a row of the plan.

    Attributes:
      name: Dotted path.
      shape: Logical shape, stack dims included.
      unit: Path of its unit, or `ROOT`.
      num_stacked: Leading dims that are the stack of its unit.
      dim: The dim that is split over data axes, or None if it stays whole there.
      padding: Zeros behind the end of `dim` where it is split, because the devices do
        not divide it.
      tensor_dim: The dim that is split over `tp`, or None.
      is_under_tp: Whether the mesh has more than one device on `tp`.
      placements: The data axes that split `dim`.
      precision: Its dtypes.
      frozen: Whether it is not trained.
      reshard: Whether its unit is gathered again for backward.
      remat_policy: What of its unit's activations is saved, see `FSDPConfig`.
      gather: How it is encoded to travel; None: it travels in its compute dtype.
    """

    name: str
    shape: tuple[int, ...]
    unit: str
    num_stacked: int
    dim: int | None
    padding: int
    tensor_dim: int | None
    is_under_tp: bool
    placements: Placements
    precision: Precision
    frozen: bool
    reshard: bool
    remat_policy: Callable[..., bool] | None
    gather: ParamGather | None = None

    @property
    def block_dim(self) -> int:
        """The dim along which MXFP8 has its blocks, from the end: one not split."""
        return -1 if self.dim != len(self.shape) - 1 else -2

    @property
    def ndim_in_unit(self) -> int:
        """Dims of the slice that its unit computes with."""
        return len(self.shape) - self.num_stacked

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape in which it is split."""
        return tuple(
            size + self.padding if dim == self.dim else size
            for dim, size in enumerate(self.shape)
        )

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """The spec that splits `dim` over the data axes `axes`, silent about `tp`."""
        return _spec({self.dim: axes} if self.dim is not None and axes else {})

    def spec_with_tp(self, axes: tuple[str, ...]) -> PartitionSpec:
        """The spec that splits `dim` over `axes`, and `tensor_dim` over `tp`."""
        split = {self.dim: axes} if self.dim is not None and axes else {}
        if self.tensor_dim is not None:
            split[self.tensor_dim] = ("tp",)
        return _spec(split)

    def num_elements(self, mesh: Mesh, axes: tuple[str, ...]) -> int:
        """Elements of it on one device when split over `axes`, padding included."""
        tp = 1 if self.tensor_dim is None else mesh.shape["tp"]
        shape = self.padded_shape if axes else self.shape
        return math.prod(shape) // num_devices(mesh, axes) // tp


def _spec(split: dict[int, tuple[str, ...]]) -> PartitionSpec:
    dims = [split.get(dim) for dim in range(max(split, default=-1) + 1)]
    # One axis as its name: jax takes P("x") and P(("x",)) for different specs.
    return PartitionSpec(*(d[0] if d and len(d) == 1 else d for d in dims))


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
      unit_specs: The units as `fully_shard` was given them.
      unit_classes: Classes whose `__call__` is a unit.
      placements: The data axes that split every parameter that is split.
    """

    mesh: Mesh
    config: FSDPConfig
    make_model: MakeModel
    model: ModelDef
    rows: tuple[ParamPlan, ...]
    unit_specs: tuple[Any, ...]
    unit_classes: tuple[type, ...]
    placements: Placements

    @property
    def params(self) -> PyTree:
        """The mould of the parameters: logical shapes, main dtypes, shardings at rest.

        A parameter that rests padded in a `TrainState` is whole here: no array of its
        logical shape could be split.
        """
        return self._unflatten(
            self._struct(row, row.precision.main_params) for row in self.rows
        )

    @property
    def packed_params(self) -> PyTree:
        """The mould of the parameters in a `TrainState`: as `params`, but `Padded`."""
        packed = []
        for row in self.rows:
            axes = row.placements.optimizer
            struct = jax.ShapeDtypeStruct(
                row.padded_shape,
                row.precision.main_params,
                sharding=NamedSharding(self.mesh, row.spec_with_tp(axes)),
            )
            packed.append(Padded(struct, row.shape) if row.padding else struct)
        return self._unflatten(packed)

    @property
    def grads(self) -> PyTree:
        """The mould of the gradients of `value_and_grad`; None where frozen."""
        return self._unflatten(
            None if row.frozen else self._struct(row, row.precision.main_grads)
            for row in self.rows
        )

    @property
    def model_state(self) -> PyTree:
        """The mould of the arrays that are no parameters; whole on every device."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=NamedSharding(self.mesh, PartitionSpec()),
            ),
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
    def manual_axes(self) -> frozenset[str]:
        """Mesh axes over which the step is written device by device.

        All of them, or all but `tp`: what is split over that is left to XLA.
        """
        tp = {"tp"} if self.mesh.shape["tp"] > 1 else set()
        return frozenset(self.mesh.axis_names) - tp

    @property
    def late_axes(self) -> tuple[str, ...]:
        """Data axes over which gradients of what is split are reduced only once."""
        axes = axes_in_use(self.mesh, DATA_AXES)
        return tuple(a for a in axes if a not in self.placements.gradient)

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
            if not row.frozen:
                sizes["grads"] += held * row.precision.main_grads.itemsize
        return sizes

    @property
    def treedef(self) -> Any:
        """The structure of the parameters."""
        return jax.tree.structure(self.model.params)

    @property
    def encoded_bytes(self) -> int:
        """Bytes on one device, during a step, for pieces encoded to be gathered."""
        total = 0
        for row in self.rows:
            if row.gather:
                held = row.num_elements(self.mesh, row.placements.parameter)
                total += held
                if isinstance(row.gather, MXFP8Gather):
                    size = row.shape[row.block_dim]
                    if row.tensor_dim == len(row.shape) + row.block_dim:
                        size //= self.mesh.shape["tp"]
                    total += held // size * num_blocks(size)
        return total

    def __repr__(self) -> str:
        """The table: one row a parameter, then the mesh and the bytes a device."""
        table = text_table(_COLUMNS, [_cells(self, row) for row in self.rows])
        return "\n".join([table, "", *_summary(self)])

    def _unflatten(self, leaves: Iterable[Any]) -> PyTree:
        return self.treedef.unflatten(leaves)

    def _struct(self, row: ParamPlan, dtype: Any) -> jax.ShapeDtypeStruct:
        axes = () if row.padding else row.placements.optimizer
        sharding = NamedSharding(self.mesh, row.spec_with_tp(axes))
        return jax.ShapeDtypeStruct(row.shape, dtype, sharding=sharding)


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
    rests = row.precision.main_params
    return (
        row.name,
        str(row.shape),
        rests.name,
        row.gather.name if row.gather else row.precision.param.name,
        row.unit + (" (stacked)" if row.num_stacked else ""),
        _split(row),
        f"{row.num_elements(plan.mesh, axes) * rests.itemsize:,}",
    )


def _split(row: ParamPlan) -> str:
    """How one parameter is split, in words."""
    parts = []
    if row.placements.optimizer:
        parts.append(f"dim {row.dim} over {' x '.join(row.placements.optimizer)}")
    if row.padding:
        assert row.dim is not None
        size = row.shape[row.dim]
        parts.append(f"padded {size} to {size + row.padding}")
    if row.tensor_dim is not None:
        parts.append(f"dim {row.tensor_dim} over tp")
    if row.frozen:
        parts.append("frozen")
    return ", ".join(parts) or "whole"


def _largest_unit(plan: Plan) -> int:
    """Bytes of the largest unit's whole weights as computed with, one of a stack."""
    sizes = dict.fromkeys(plan.units, 0)
    for row in plan.rows:
        if row.unit != ROOT:
            elements = math.prod(row.shape[row.num_stacked :])
            sizes[row.unit] += elements * row.precision.param.itemsize
    return max(sizes.values(), default=0)


def _padding_bytes(plan: Plan, padded: Sequence[ParamPlan]) -> int:
    """What a device holds more of the padded parameters than an even split."""
    extra = 0.0
    for row in padded:
        even = math.prod(row.shape) / num_devices(plan.mesh, row.placements.optimizer)
        held = row.num_elements(plan.mesh, row.placements.optimizer)
        extra += (held - even) * row.precision.main_params.itemsize
    return round(extra)


def _summary(plan: Plan) -> list[str]:
    sizes = plan.bytes_per_device
    axes = ", ".join(f"{a}={n}" for a, n in plan.mesh.shape.items() if n > 1)
    whole = [row.name for row in plan.rows if not row.placements.optimizer]
    at_entry = sum(
        math.prod(row.shape) * row.precision.param.itemsize
        for row in plan.rows
        if row.unit == ROOT
    )
    frozen = sum(row.frozen for row in plan.rows)
    counts = f"parameters: {len(plan.rows)}, units: {len(plan.units)}"
    at_rest = [f"{format_bytes(size)} {kind}" for kind, size in sizes.items()]
    lines = [
        f"{counts}, devices: {plan.mesh.size} ({axes or 'a single one'})",
        f"a device at rest: {', '.join(at_rest)}; optimizer state comes on top",
        f"whole during a step: {format_bytes(at_entry)} in no unit, all the time; "
        f"{format_bytes(_largest_unit(plan))} in the largest unit, while it runs",
    ]
    if frozen:
        lines.append(f"frozen, with neither gradient nor optimizer state: {frozen}")
    if encoded := [row.gather.name for row in plan.rows if row.gather]:
        lines.append(
            f"encoded to be gathered: {len(encoded)} as {encoded[0]}, "
            f"{format_bytes(plan.encoded_bytes)} a device during a step"
        )
    if padded := [row for row in plan.rows if row.padding]:
        lines.append(
            f"padded, since no dim divides: {len(padded)}, "
            f"{format_bytes(_padding_bytes(plan, padded))} of zeros a device"
        )
    if whole and plan.mesh.size > 1:
        lines.append(f"whole on every device: {', '.join(whole)}")
    if not plan.units:
        lines.append(
            "no units: the whole model is gathered at the entry of the loss; pass "
            "units=[LayerClass] to gather a layer at a time"
        )
    return lines
