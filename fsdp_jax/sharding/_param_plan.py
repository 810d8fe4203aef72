"""How one parameter lies on the devices: a row of the plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jax.sharding import Mesh, PartitionSpec

from fsdp_jax.sharding._config import Placements, Precision
from fsdp_jax.sharding._low_precision import ParamGather
from fsdp_jax.sharding._mesh import num_devices

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
      expert_dim: The dim that is split over `ep` all the time, or None: each rank there
        computes with experts of its own.
      is_under_tp: Whether the mesh has more than one device on `tp`.
      placements: The data axes that split `dim`.
      precision: Its dtypes.
      frozen: Whether it is not trained.
      reshard: Whether its unit is gathered again for backward.
      remat_policy: What of its unit's activations is saved, see `FSDPConfig`.
      is_cut: Whether this is the form of `in_step`, and not the parameter's own.
      gather: How it is encoded to travel; None: it travels in its compute dtype.
      is_overwritten: Whether what comes out as its gradient is its next value, as flax
        hands out the state of fp8 products: the largest of all ranks and microbatches
        takes its place, and the optimizer does not see it.
      is_staged: Whether its first dim, the stack, is split over `pp`: each stage of the
        pipeline has the layers that it runs.
      stage_padding: Layers of zeros behind the last one where it is split so.
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
    is_cut: bool = False
    gather: ParamGather | None = None
    is_overwritten: bool = False
    is_staged: bool = False
    stage_padding: int = 0

    @property
    def is_optimized(self) -> bool:
        """Whether the optimizer moves it."""
        return not (self.frozen or self.is_overwritten)

    @property
    def block_dim(self) -> int:
        """The dim along which MXFP8 has its blocks, from the end: one not split."""
        if self.dim != len(self.shape) - 1:
            return -1
        return -3 if self.is_cut else -2

    @property
    def ndim_in_unit(self) -> int:
        """Dims of the slice that its unit computes with."""
        return len(self.shape) - self.num_stacked

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape in which it is split."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] += self.padding
        if self.is_staged:
            shape[0] += self.stage_padding
        return tuple(shape)

    @property
    def is_padded(self) -> bool:
        """Whether it is split in a shape other than its own."""
        return bool(self.padding or self.stage_padding)

    @property
    def logical_spec(self) -> PartitionSpec:
        """The spec at rest of an array in its own shape, of what this divides."""
        row = dataclasses.replace(
            self, is_staged=self.is_staged and not self.stage_padding
        )
        return row.spec_with_tp(() if self.padding else self.placements.optimizer)

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """The spec that splits `dim` over the data axes `axes`, silent about `tp`."""
        return _spec(self._split(axes))

    def spec_with_tp(self, axes: tuple[str, ...]) -> PartitionSpec:
        """The spec that splits `dim` over `axes`, and `tensor_dim` over `tp`."""
        split = self._split(axes)
        if self.tensor_dim is not None:
            split[self.tensor_dim] = ("tp", *split.get(self.tensor_dim, ()))
        return _spec(split)

    def in_step(self, tp: int) -> ParamPlan:
        """The form in which a step has it: `dim` and `tensor_dim` are two dims.

        Where they are one, each rank of tp has a contiguous part of that dim, of which
        data axes split what is inside: a gather over these brings the part together,
        and nothing is permuted. So that dim is cut in two, `(tp, rest)`.
        """
        dim = self.dim
        if dim is None or dim != self.tensor_dim:
            return self
        shape = (*self.shape[:dim], tp, self.shape[dim] // tp, *self.shape[dim + 1 :])
        expert_dim = self.expert_dim
        if expert_dim is not None:
            expert_dim += expert_dim > dim
        return dataclasses.replace(
            self, shape=shape, dim=dim + 1, expert_dim=expert_dim, is_cut=True
        )

    def num_elements(self, mesh: Mesh, axes: tuple[str, ...]) -> int:
        """Elements of it on one device when split over `axes`, padding included."""
        shape = self.padded_shape if axes else self.shape
        return math.prod(self.on_device(mesh, shape, axes))

    def on_device(
        self, mesh: Mesh, shape: tuple[int, ...], axes: tuple[str, ...]
    ) -> tuple[int, ...]:
        """The dims of `shape` on one device, split over `axes`, `tp` and `ep`."""
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

    def late_axes(self, data_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `data_axes` over which a microbatch leaves its gradient partial.

        Never `ep` for experts: tokens of all its ranks have come to them. Nor `pp` for
        what one stage alone has.
        """
        done = {*self.placements.gradient}
        done |= {"ep"} if self.is_expert else set()
        done |= {"pp"} if self.is_staged else set()
        return tuple(axis for axis in data_axes if axis not in done)

    @property
    def is_expert(self) -> bool:
        """Whether each rank on `ep` has experts of its own in it."""
        return self.expert_dim is not None

    def _split(self, axes: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
        split = {self.dim: axes} if self.dim is not None and axes else {}
        if self.expert_dim is not None:
            split[self.expert_dim] = ("ep",)
        if self.is_staged:
            split[0] = ("pp",)
        return split


def _spec(split: dict[int, tuple[str, ...]]) -> PartitionSpec:
    dims = [split.get(dim) for dim in range(max(split, default=-1) + 1)]
    # One axis as its name: jax takes P("x") and P(("x",)) for different specs.
    return PartitionSpec(*(d[0] if d and len(d) == 1 else d for d in dims))
