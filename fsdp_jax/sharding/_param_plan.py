"""Plan of one parameter: its shape, unit, split dims and dtypes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from jax.sharding import Mesh, PartitionSpec

from fsdp_jax.sharding._config import Placements
from fsdp_jax.sharding._mesh import num_devices
from fsdp_jax.sharding._param_gather import ParamGather
from fsdp_jax.sharding._precision import Precision

ROOT = "(root)"
"""Unit of parameters that belong to no other, gathered at the entry of the loss."""


@dataclasses.dataclass(frozen=True)
class ParamPlan:
    """Plan of one parameter: its shape, unit, split dims and dtypes.

    Attributes:
      name: Dotted path.
      shape: Logical shape, stacked dims included.
      unit: Path of its unit, or `ROOT`.
      num_stacked: Number of leading dims that are the stack of its unit.
      dim: Dim that is split over data axes; None if it is not split over them.
      padding: Zeros at the end of `dim` where it is split, because the devices do not
        divide it.
      tensor_dim: Dim that is split over `tp`, or None.
      expert_dim: Dim that is split over `ep` all the time, or None: each rank there
        computes with experts of its own.
      is_under_tp: True if the mesh has more than one device on `tp`.
      placements: Data axes that split `dim`.
      precision: Dtypes of the parameter and its gradient.
      frozen: True if it is not trained.
      reshard: True if its unit is gathered again for backward.
      remat_policy: `jax.checkpoint` policy of its unit, see `FSDPConfig`.
      prefetch: Number of units that `fsdp_jax.scan` gathers ahead of this one's, see
        `FSDPConfig`.
      is_factored: True if this is the factored form that `step_layout` returns.
      gather: Quantized format in which it is gathered; None: its compute dtype.
      overwrite_with_gradient: True if its gradient is its next value, as for flax's
        fp8 state (`_overwrite_with_gradient`): the maximum over all ranks and
        microbatches replaces it, and the optimizer does not see it.
      is_staged: True if its first dim, the stack, is split over `pp`: each pipeline
        stage stores consecutive layers, see `Stages` for those that it runs.
      stage_padding: Layers of zeros after the last one, where the stack is split.

    Examples:
      >>> for param in plan.param_plans:
      ...     print(param.name, param.shape, param.unit, param.dim)
      head (16, 16) (root) 0
      layers.w (2, 16, 16) layers 1
    """

    name: str
    shape: tuple[int, ...]
    unit: str
    num_stacked: int
    dim: int | None
    padding: int
    tensor_dim: int | None
    expert_dim: int | None
    is_under_tp: bool
    placements: Placements
    precision: Precision
    frozen: bool
    reshard: bool
    remat_policy: Callable[..., bool] | None
    prefetch: int = 0
    is_factored: bool = False
    gather: ParamGather | None = None
    overwrite_with_gradient: bool = False
    is_staged: bool = False
    stage_padding: int = 0

    @property
    def is_optimized(self) -> bool:
        """True if the optimizer updates it."""
        return not (self.frozen or self.overwrite_with_gradient)

    @property
    def block_dim(self) -> int:
        """Dim of the blocks, counted from the end; not split over data axes."""
        if self.dim != len(self.shape) - 1:
            return -1
        # The last dim is split. In step layout the one before it is the factor of tp.
        return -3 if self.is_factored else -2

    @property
    def ndim_in_unit(self) -> int:
        """Number of dims of the slice that its unit computes with."""
        return len(self.shape) - self.num_stacked

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape in which it is split."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] += self.padding
        if self.is_staged:
            shape[0] += self.stage_padding
        return tuple(shape)

    @property
    def is_padded(self) -> bool:
        """True if it is split in a shape other than its own."""
        return bool(self.padding or self.stage_padding)

    @property
    def logical_spec(self) -> PartitionSpec:
        """Stored spec of the array in its logical shape: a padded dim is not split."""
        param = dataclasses.replace(
            self, is_staged=self.is_staged and not self.stage_padding
        )
        return param.spec_with_tp(() if self.padding else self.placements.optimizer)

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Returns the spec that splits `dim` over data axes, without `tp`."""
        return spec_of_split(self._split(axes))

    def spec_with_tp(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Returns the spec that splits `dim` over `axes` and `tensor_dim` over `tp`."""
        split = self._split(axes)
        if self.tensor_dim is not None:
            split[self.tensor_dim] = ("tp", *split.get(self.tensor_dim, ()))
        return spec_of_split(split)

    def step_layout(self, tp: int) -> ParamPlan:
        """Returns the plan in step layout, where `dim` and `tensor_dim` are two dims.

        If they are one dim, each rank of tp has a contiguous part of it, and data axes
        split that part: a gather over them restores the part without a permutation. So
        the dim is factored in two, `(tp, rest)`.
        """
        dim = self.dim
        if dim is None or dim != self.tensor_dim:
            return self
        shape = (*self.shape[:dim], tp, self.shape[dim] // tp, *self.shape[dim + 1 :])
        expert_dim = self.expert_dim
        if expert_dim is not None:
            expert_dim += expert_dim > dim
        return dataclasses.replace(
            self, shape=shape, dim=dim + 1, expert_dim=expert_dim, is_factored=True
        )

    def num_elements(self, mesh: Mesh, axes: tuple[str, ...]) -> int:
        """Returns its elements on one device if split over `axes`, padding included."""
        shape = self.padded_shape if axes else self.shape
        return math.prod(self.on_device(mesh, shape, axes))

    def on_device(
        self, mesh: Mesh, shape: tuple[int, ...], axes: tuple[str, ...]
    ) -> tuple[int, ...]:
        """Returns the dims of `shape` on one device.

        Data axes `axes`, `tp`, `ep` and `pp` split it.
        """
        dims, tp = list(shape), mesh.shape["tp"]
        for dim, devices in (
            (self.dim, num_devices(mesh, axes)),
            (self.tensor_dim, tp),
            (self.expert_dim, mesh.shape["ep"]),
            (0 if self.is_staged else None, mesh.shape["pp"]),
        ):
            if dim is not None:
                dims[dim] //= devices
        return tuple(dims)

    def deferred_axes(self, data_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the `data_axes` over which a microbatch leaves its gradient partial.

        Never `ep` for experts: the tokens of all its ranks have been sent to them.
        Never `pp` for a parameter that only one stage has.
        """
        done = {*self.placements.gradient}
        done |= {"ep"} if self.is_expert else set()
        done |= {"pp"} if self.is_staged else set()
        return tuple(axis for axis in data_axes if axis not in done)

    @property
    def is_expert(self) -> bool:
        """True if each rank on `ep` has experts of its own in it."""
        return self.expert_dim is not None

    def _split(self, axes: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
        split = {self.dim: axes} if self.dim is not None and axes else {}
        if self.expert_dim is not None:
            split[self.expert_dim] = ("ep",)
        if self.is_staged:
            split[0] = ("pp",)
        return split


def spec_of_split(split: Mapping[int, tuple[str, ...]]) -> PartitionSpec:
    """Returns the spec of an array.

    Args:
      split: Dim -> mesh axes that split it; none of them empty.
    """
    dims = [split.get(dim) for dim in range(max(split, default=-1) + 1)]
    # One axis as its name: jax takes P("x") and P(("x",)) for different specs.
    return PartitionSpec(*(d[0] if d and len(d) == 1 else d for d in dims))
