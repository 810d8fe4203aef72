"""What is sharded, where, and what it costs: a plan is data, and prints as a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax._report import Grid, format_bytes, html_page
from fsdp_jax._tree import PyTree, matches, named_leaves
from fsdp_jax.sharding._config import FSDPConfig, Placements
from fsdp_jax.sharding._low_precision import MXFP8Gather, num_blocks
from fsdp_jax.sharding._memory_summary import held_lines
from fsdp_jax.sharding._mesh import BATCH_AXES, DATA_AXES, axes_in_use, num_devices
from fsdp_jax.sharding._model_def import MakeModel, ModelDef
from fsdp_jax.sharding._padded import Padded
from fsdp_jax.sharding._param_plan import ROOT as ROOT
from fsdp_jax.sharding._param_plan import ParamPlan as ParamPlan
from fsdp_jax.sharding._pipeline_report import pipeline_lines
from fsdp_jax.sharding._stages import Stages


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
            packed.append(Padded(struct, row.shape) if row.is_padded else struct)
        return self._unflatten(packed)

    @property
    def grads(self) -> PyTree:
        """The mould of the gradients of `value_and_grad`; None where frozen."""
        return self._unflatten(
            None if row.frozen else self._struct(row, row.precision.main_grads)
            for row in self.rows
        )

    @property
    def rows_in_step(self) -> tuple[ParamPlan, ...]:
        """The rows in the form that a step has them in."""
        return tuple(row.in_step(self.mesh.shape["tp"]) for row in self.rows)

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
        return self.model.is_random or any(
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
    def stages(self) -> Stages:
        """How layers lie on the stages over `pp`, of which there are several."""
        row = next(row for row in self.rows if row.is_staged)
        virtual = self.config.pipeline.virtual_stages
        return Stages(row.shape[0], self.mesh.shape["pp"], virtual)

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
        """How a batch lies: its first dim split over the data axes of the mesh.

        With `cp`, see `batch_shardings`.
        """
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    def batch_specs(self, batch: PyTree) -> PyTree:
        """A `PartitionSpec` for each leaf of a batch: rows, and over `cp` the sequence.

        Args:
          batch: Arrays or their moulds.
        """
        dims = sequence_dims(self, batch)
        return jax.tree.structure(batch).unflatten(
            PartitionSpec(BATCH_AXES, *(None,) * (dim - 1), "cp")
            if dim
            else PartitionSpec(BATCH_AXES)
            for dim in dims
        )

    def batch_shardings(self, batch: PyTree) -> PyTree:
        """A `NamedSharding` for each leaf of a batch, see `batch_specs`."""
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), self.batch_specs(batch)
        )

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
                axes = row.placements.parameter
                dims = list(row.on_device(self.mesh, row.padded_shape, axes))
                total += math.prod(dims)
                if isinstance(row.gather, MXFP8Gather):
                    dims[row.block_dim] = num_blocks(dims[row.block_dim])
                    total += math.prod(dims)
        return total

    def __repr__(self) -> str:
        """The table: one row a parameter, then the mesh and the bytes a device."""
        return "\n".join([_grid(self).as_text(), "", *_summary(self)])

    def _repr_html_(self) -> str:
        """The same for a notebook, with a bar for the bytes of each parameter."""
        return html_page([_grid(self), *_summary(self)])

    def _unflatten(self, leaves: Iterable[Any]) -> PyTree:
        return self.treedef.unflatten(leaves)

    def _struct(self, row: ParamPlan, dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, row.logical_spec)
        return jax.ShapeDtypeStruct(row.shape, dtype, sharding=sharding)


def sequence_dims(plan: Plan, batch: PyTree) -> list[int]:
    """The dim of each leaf that is split over `cp`; 0, the rows', for none."""
    if plan.mesh.shape["cp"] == 1:
        return [0] * len(jax.tree.leaves(batch))
    return [
        next(
            (
                dim % max(leaf.ndim, 1)
                for pattern, dim in plan.config.context_parallel.items()
                if matches(pattern, name) is not None
            ),
            0,
        )
        for name, leaf in named_leaves(batch)
    ]


_COLUMNS = {
    "parameter": "left",
    "shape": "right",
    "rests as": "left",
    "gathered as": "left",
    "unit": "left",
    "split": "left",
    "bytes/device": "right",
}


def _grid(plan: Plan) -> Grid:
    return Grid(
        _COLUMNS,
        [_cells(plan, row) for row in plan.rows],
        [_bytes_at_rest(plan, row) for row in plan.rows],
    )


def _bytes_at_rest(plan: Plan, row: ParamPlan) -> int:
    held = row.num_elements(plan.mesh, row.placements.optimizer)
    return held * row.precision.main_params.itemsize


def _cells(plan: Plan, row: ParamPlan) -> tuple[str, ...]:
    rests = row.precision.main_params
    return (
        row.name,
        str(row.shape),
        rests.name,
        row.gather.name if row.gather else row.precision.param.name,
        row.unit + (" (stacked)" if row.num_stacked else ""),
        _split(row),
        f"{_bytes_at_rest(plan, row):,}",
    )


def _split(row: ParamPlan) -> str:
    """How one parameter is split, in words."""
    parts = []
    axes = row.placements.optimizer
    if row.is_staged:
        parts.append("dim 0 over pp")
    if row.stage_padding:
        size = row.shape[0]
        parts.append(f"padded {size} to {size + row.stage_padding}")
    is_one_dim = bool(axes) and row.dim == row.tensor_dim
    if is_one_dim:
        parts.append(f"dim {row.dim} over {' x '.join(('tp', *axes))}")
    elif axes:
        parts.append(f"dim {row.dim} over {' x '.join(axes)}")
    if row.padding:
        assert row.dim is not None
        size = row.shape[row.dim]
        parts.append(f"padded {size} to {size + row.padding}")
    if row.tensor_dim is not None and not is_one_dim:
        parts.append(f"dim {row.tensor_dim} over tp")
    if row.expert_dim is not None:
        parts.append(f"dim {row.expert_dim} over ep")
    if row.frozen:
        parts.append("frozen")
    return ", ".join(parts) or "whole"


def _whole_over_tp(plan: Plan) -> list[str]:
    """Matrices that each rank of tp computes with as a whole."""
    if plan.mesh.shape["tp"] == 1:
        return []
    return [r.name for r in plan.rows if r.tensor_dim is None and r.ndim_in_unit > 1]


def _padding_bytes(plan: Plan, padded: Sequence[ParamPlan]) -> int:
    """What a device holds more of the padded parameters than an even split."""
    extra = 0.0
    for row in padded:
        even = row.num_elements(plan.mesh, ()) / num_devices(
            plan.mesh, row.placements.optimizer
        )
        held = row.num_elements(plan.mesh, row.placements.optimizer)
        extra += (held - even) * row.precision.main_params.itemsize
    return round(extra)


def _summary(plan: Plan) -> list[str]:
    sizes = plan.bytes_per_device
    axes = ", ".join(f"{a}={n}" for a, n in plan.mesh.shape.items() if n > 1)
    whole = [
        row.name for row in plan.rows if not (row.placements.optimizer or row.is_expert)
    ]
    frozen = sum(row.frozen for row in plan.rows)
    experts = sum(row.is_expert for row in plan.rows)
    counts = f"parameters: {len(plan.rows)}, units: {len(plan.units)}"
    at_rest = [f"{format_bytes(size)} {kind}" for kind, size in sizes.items()]
    lines = [
        f"{counts}, devices: {plan.mesh.size} ({axes or 'a single one'})",
        f"a device at rest: {', '.join(at_rest)}; optimizer state comes on top",
        *held_lines(plan.mesh, plan.rows, plan.model.decoded),
    ]
    if experts:
        lines.append(f"experts, never gathered over ep: {experts}")
    elif plan.mesh.shape["ep"] > 1:
        lines.append(
            f"ep={plan.mesh.shape['ep']} is as dp_shard here, since no experts are "
            "split over it: FSDPConfig(expert_parallel=...) names none"
        )
    if (cp := plan.mesh.shape["cp"]) > 1:
        dims = plan.config.context_parallel.items()
        split = ", ".join(f"dim {dim} of {pattern}" for pattern, dim in dims)
        lines.append(f"the sequence of a batch, over cp={cp}: {split}")
    if state := [name for name, _ in named_leaves(plan.model.state)]:
        more = f" and {len(state) - 5} more" if len(state) > 5 else ""
        lines.append(f"arrays, not parameters: {', '.join(state[:5])}{more}")
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
    if names := _whole_over_tp(plan):
        lines.append(f"whole on each rank of tp: {', '.join(names)}")
    if plan.mesh.shape["pp"] > 1:
        lines += pipeline_lines(plan.mesh, plan.config, plan.stages, plan.rows)
    if not plan.units:
        lines.append(
            "no units: the whole model is gathered at the entry of the loss; pass "
            "units=[LayerClass] to gather a layer at a time"
        )
    return lines
