"""Plan of a sharded model: data that prints as a table with bytes per device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax._report import format_bytes, html_page
from fsdp_jax._tree import PyTree, matches, named_leaves
from fsdp_jax.sharding._annotations import ignored_line
from fsdp_jax.sharding._config import FSDPConfig, Placements
from fsdp_jax.sharding._memory_summary import memory_summary, padding_bytes
from fsdp_jax.sharding._mesh import BATCH_AXES, DATA_AXES, axes_in_use
from fsdp_jax.sharding._model_def import MakeModel, ModelDef
from fsdp_jax.sharding._padded import Padded
from fsdp_jax.sharding._param_gather import byte_dims, scale_dims
from fsdp_jax.sharding._param_plan import ROOT as ROOT
from fsdp_jax.sharding._param_plan import ParamPlan as ParamPlan
from fsdp_jax.sharding._param_table import param_table
from fsdp_jax.sharding._pipeline_report import pipeline_lines
from fsdp_jax.sharding._stages import Stages
from fsdp_jax.sharding._state_report import state_lines
from fsdp_jax.sharding._streaming import streaming_line
from fsdp_jax.sharding._unit_methods import UnitClasses


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Plan of a sharded model: the mesh axes that split each parameter. Has no arrays.

    Made by `fully_shard` and passed to every function that acts on the model.
    `print(plan)` shows one line a parameter and the bytes per device.

    Attributes:
      mesh: Device mesh.
      config: `FSDPConfig` it was made with.
      make_model: The user's function of a PRNG key that returns a model.
      model: Definition of the model, without its arrays.
      param_plans: One `ParamPlan` a parameter, in the order of
        `jax.tree.leaves(params)`.
      unit_specs: Units as passed to `fully_shard`.
      unit_classes: Classes whose objects are units, and the names of the methods that
        enter them; None for all methods.
      placements: Data axes that split every parameter that is split, except experts and
        what pipeline stages change.

    Examples:
      >>> plan.units
      ('layers',)
      >>> plan.bytes_per_device
      {'params': 384, 'grads': 384}
      >>> {param.name: param.split.dim for param in plan.param_plans}
      {'head': 0, 'layers.w': 1}
    """

    mesh: Mesh
    config: FSDPConfig
    make_model: MakeModel
    model: ModelDef
    param_plans: tuple[ParamPlan, ...]
    unit_specs: tuple[Any, ...]
    unit_classes: UnitClasses
    placements: Placements

    @property
    def params(self) -> PyTree:
        """Abstract parameters: logical shapes, main dtypes, shardings as stored.

        A dim that is stored padded in a `TrainState` is not split here: the devices do
        not divide the logical shape.
        """
        return self._unflatten(
            self._struct(param, param.precision.main_params)
            for param in self.param_plans
        )

    @property
    def packed_params(self) -> PyTree:
        """Abstract parameters of a `TrainState`: as `params`, but `Padded`."""
        packed = []
        for param in self.param_plans:
            axes = param.placements.optimizer
            struct = jax.ShapeDtypeStruct(
                param.padded_shape,
                param.precision.main_params,
                sharding=NamedSharding(self.mesh, param.spec_with_tp(axes)),
            )
            packed.append(Padded(struct, param.shape) if param.is_padded else struct)
        return self._unflatten(packed)

    @property
    def grads(self) -> PyTree:
        """Abstract gradients of `value_and_grad`; None for frozen parameters."""
        return self._unflatten(
            None if param.is_frozen else self._struct(param, param.precision.main_grads)
            for param in self.param_plans
        )

    @property
    def params_in_step(self) -> tuple[ParamPlan, ...]:
        """Plans of the parameters in step layout."""
        return tuple(
            param.step_layout(self.mesh.shape["tp"]) for param in self.param_plans
        )

    @property
    def model_state(self) -> PyTree:
        """Abstract arrays of the model that are not parameters; replicated."""
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
        """True if the model contains PRNG keys, as dropout does."""
        return self.model.is_random or any(
            jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            for leaf in jax.tree.leaves(self.model.state)
        )

    @property
    def manual_axes(self) -> frozenset[str]:
        """Mesh axes over which the step runs under `shard_map`.

        All axes, or all but `tp`: XLA partitions what is split over that.
        """
        tp = {"tp"} if self.mesh.shape["tp"] > 1 else set()
        return frozenset(self.mesh.axis_names) - tp

    @property
    def stages(self) -> Stages:
        """Split of the stack over the stages; needs several devices on `pp`."""
        param = next(param for param in self.param_plans if param.is_staged)
        virtual = self.config.pipeline.virtual_stages
        return Stages(param.shape[0], self.mesh.shape["pp"], virtual)

    @property
    def deferred_axes(self) -> tuple[str, ...]:
        """Data axes over which gradients of split parameters are reduced only once."""
        axes = axes_in_use(self.mesh, DATA_AXES)
        return tuple(a for a in axes if a not in self.placements.gradient)

    @property
    def prefetch(self) -> int:
        """Number of units whose weights are gathered ahead; 0 if none is split."""
        return max(
            (param.unit_policy.prefetch for param in self.param_plans), default=0
        )

    @property
    def specs(self) -> PyTree:
        """`PartitionSpec` of each parameter as stored."""
        return jax.tree.map(lambda leaf: leaf.sharding.spec, self.params)

    @property
    def shardings(self) -> PyTree:
        """`NamedSharding` of each parameter as stored."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.params)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a batch: its first dim split over the batch axes of the mesh.

        With `cp`, see `batch_shardings`.
        """
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    def batch_specs(self, batch: PyTree) -> PyTree:
        """Returns a `PartitionSpec` for each leaf of a batch.

        Rows are split over the batch axes, the sequence over `cp`.

        Args:
          batch: Batch of arrays, concrete or abstract.
        """
        dims = sequence_dims(self, batch)
        return jax.tree.structure(batch).unflatten(
            PartitionSpec(BATCH_AXES, *(None,) * (dim - 1), "cp")
            if dim
            else PartitionSpec(BATCH_AXES)
            for dim in dims
        )

    def batch_shardings(self, batch: PyTree) -> PyTree:
        """Returns a `NamedSharding` for each leaf of a batch, see `batch_specs`."""
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), self.batch_specs(batch)
        )

    @property
    def units(self) -> tuple[str, ...]:
        """Paths of the units, in order of appearance, without the root."""
        return tuple(dict.fromkeys(r.unit for r in self.param_plans if r.unit != ROOT))

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes of the stored parameters and of their gradients on one device."""
        sizes = {"params": 0, "grads": 0}
        for param in self.param_plans:
            sizes["params"] += param.stored_bytes(self.mesh)
            if not param.is_frozen:
                elements = param.num_elements(self.mesh, param.placements.optimizer)
                sizes["grads"] += elements * param.precision.main_grads.itemsize
        return sizes

    @property
    def treedef(self) -> Any:
        """Tree structure of the parameters."""
        return jax.tree.structure(self.model.params)

    @property
    def quantized_bytes(self) -> int:
        """Bytes of quantized shards on one device during a step."""
        total = 0
        for param in self.param_plans:
            if param.gather:
                axes = param.placements.parameter
                dims = param.split.on_device(self.mesh, param.padded_shape, axes)
                total += sum(map(math.prod, self.quantized_dims(param, dims)))
        return total

    def quantized_dims(
        self, param: ParamPlan, dims: tuple[int, ...]
    ) -> list[tuple[int, ...]]:
        """Returns the dims of a quantized array's bytes, and of its blocks' scales.

        Args:
          param: Parameter whose `gather` is set.
          dims: Dims of the array, with or without stacked dims.
        """
        assert param.gather is not None
        assert param.split.dim is not None
        split_dim = param.split.dim - len(param.shape)
        axes = param.placements.optimizer
        stored = param.split.on_device(self.mesh, param.padded_shape, axes)[split_dim]
        sizes = byte_dims(param.gather, dims, param.block_dim)
        scales = scale_dims(param.gather, dims, param.block_dim, split_dim, stored)
        return [sizes] if scales is None else [sizes, scales]

    def __repr__(self) -> str:
        """Returns the table: a line a parameter, then the mesh and bytes per device."""
        return "\n".join(
            [param_table(self.mesh, self.param_plans).as_text(), "", *_summary(self)]
        )

    def _repr_html_(self) -> str:
        """Returns the table as HTML, with a bar for the bytes of each parameter."""
        return html_page([param_table(self.mesh, self.param_plans), *_summary(self)])

    def _unflatten(self, leaves: Iterable[Any]) -> PyTree:
        return self.treedef.unflatten(leaves)

    def _struct(self, param: ParamPlan, dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, param.logical_spec)
        return jax.ShapeDtypeStruct(param.shape, dtype, sharding=sharding)


def sequence_dims(plan: Plan, batch: PyTree) -> list[int]:
    """Returns the dim of each leaf that is split over `cp`; 0, the rows', for none."""
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


def _replicated_over_tp(plan: Plan) -> list[str]:
    """Returns the names of matrices that are replicated over `tp`."""
    if plan.mesh.shape["tp"] == 1:
        return []
    return [
        r.name
        for r in plan.param_plans
        if r.split.tensor_dim is None and r.ndim_in_unit > 1
    ]


def _is_in_parts(plan: Plan, param: ParamPlan) -> bool:
    """Returns whether ranks of `tp` or `pp` store different parts of a parameter."""
    over_tp = param.split.tensor_dim is not None and plan.mesh.shape["tp"] > 1
    return over_tp or (param.is_staged and plan.mesh.shape["pp"] > 1)


def _summary(plan: Plan) -> list[str]:
    sizes = plan.bytes_per_device
    axes = ", ".join(f"{a}={n}" for a, n in plan.mesh.shape.items() if n > 1)
    experts = sum(param.is_expert for param in plan.param_plans)
    counts = f"parameters: {len(plan.param_plans)}, units: {len(plan.units)}"
    stored = [f"{format_bytes(size)} {kind}" for kind, size in sizes.items()]
    lines = [
        f"{counts}, devices: {plan.mesh.size} ({axes or 'a single one'})",
        f"stored on a device: {', '.join(stored)}; optimizer state comes on top",
        *memory_summary(plan.mesh, plan.param_plans, plan.model.decoded),
        *streaming_line(plan.mesh, plan.param_plans),
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
    lines += _exceptions(plan)
    if plan.mesh.shape["pp"] > 1:
        lines += pipeline_lines(plan.mesh, plan.config, plan.stages, plan.param_plans)
    if not plan.units:
        lines.append(
            "no units: the whole model is gathered at the entry of the loss; pass "
            "units=[LayerClass] to gather a layer at a time"
        )
    return lines


def _exceptions(plan: Plan) -> list[str]:
    """Returns lines for other arrays than parameters, and for unusual placements."""
    lines = state_lines(plan.model.params, plan.model.state)
    lines += ignored_line(plan.model.params, plan.config.tensor_parallel)
    if frozen := sum(param.is_frozen for param in plan.param_plans):
        lines.append(f"frozen, with neither gradient nor optimizer state: {frozen}")
    if quantized := [param.gather.name for param in plan.param_plans if param.gather]:
        lines.append(
            f"quantized to be gathered: {len(quantized)} as {quantized[0]}, "
            f"{format_bytes(plan.quantized_bytes)} a device during a step"
        )
    if padded := [param for param in plan.param_plans if param.split.padding]:
        lines.append(
            f"padded, since no dim divides: {len(padded)}, "
            f"{format_bytes(padding_bytes(plan.mesh, padded))} of zeros a device"
        )
    unsplit = [
        param
        for param in plan.param_plans
        if not (param.placements.optimizer or param.is_expert)
    ]
    in_parts = [p.name for p in unsplit if _is_in_parts(plan, p)]
    replicated = [p.name for p in unsplit if p.name not in in_parts]
    if replicated and plan.mesh.size > 1:
        lines.append(f"replicated on every device: {', '.join(replicated)}")
    if in_parts and axes_in_use(plan.mesh, DATA_AXES):
        lines.append(f"replicated over data axes: {', '.join(in_parts)}")
    if names := _replicated_over_tp(plan):
        lines.append(f"replicated over tp: {', '.join(names)}")
    return lines
