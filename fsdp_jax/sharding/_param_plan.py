"""Plan of one parameter: its shape, unit, split dims and dtypes."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable

from jax.sharding import Mesh, PartitionSpec

from fsdp_jax.sharding._config import Placements
from fsdp_jax.sharding._param_gather import ParamGather
from fsdp_jax.sharding._param_split import ParamSplit
from fsdp_jax.sharding._precision import Precision

ROOT = "(root)"
"""Unit of parameters that belong to no other, gathered at the entry of the loss."""
WHOLE = "model"
"""Name of the unit that is the whole model, whose path is empty."""


class ParamKind(enum.Enum):
    """What a step does with a parameter.

    Attributes:
      TRAINED: The optimizer updates it.
      FROZEN: It stays as it is, and has no gradient.
      OVERWRITTEN: Its gradient is its next value, as for flax's fp8 state
        (`_overwrite_with_gradient`): the maximum over all ranks and microbatches
        replaces it, and the optimizer does not see it.
    """

    TRAINED = "trained"
    FROZEN = "frozen"
    OVERWRITTEN = "overwritten"


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """How the unit of a parameter is gathered; see `FSDPConfig`.

    Attributes:
      reshard: True if the unit is gathered again for backward.
      remat_policy: `jax.checkpoint` policy of the unit; None saves what needs no
        gather.
      prefetch: Number of units that `fsdp_jax.scan` gathers ahead of this one.
      is_nested: Whether a loop of the loss runs a `fsdp_jax.scan` over it that gathers
        ahead by itself. The trace of a loss tells, not the plan.
    """

    reshard: bool
    remat_policy: Callable[..., bool] | None = None
    prefetch: int = 0
    is_nested: bool = False


@dataclasses.dataclass(frozen=True)
class ParamPlan:
    """Plan of one parameter: its shape, unit, split dims and dtypes.

    Attributes:
      name: Dotted path.
      shape: Logical shape, stacked dims included.
      unit: Path of its unit, or `ROOT`.
      num_stacked: Number of leading dims that are the stack of its unit.
      kind: Whether it is trained, frozen or overwritten.
      split: Dims that mesh axes split.
      placements: Data axes that split `split.dim`.
      precision: Dtypes of the parameter and its gradient.
      unit_policy: How its unit is gathered.
      is_under_tp: True if the mesh has more than one device on `tp`.
      gather: Quantized format in which it is gathered; None: its compute dtype.
      is_streamed: True if a step leaves it in host memory and copies one unit's slice
        at a time to the device.

    Examples:
      >>> for param in plan.param_plans:
      ...     print(param.name, param.shape, param.unit, param.split.dim)
      head (16, 16) (root) 0
      layers.w (2, 16, 16) layers 1
    """

    name: str
    shape: tuple[int, ...]
    unit: str
    num_stacked: int
    kind: ParamKind
    split: ParamSplit
    placements: Placements
    precision: Precision
    unit_policy: UnitPolicy
    is_under_tp: bool = False
    gather: ParamGather | None = None
    is_streamed: bool = False

    @property
    def is_optimized(self) -> bool:
        """True if the optimizer updates it."""
        return self.kind is ParamKind.TRAINED

    @property
    def is_frozen(self) -> bool:
        """True if it has no gradient."""
        return self.kind is ParamKind.FROZEN

    @property
    def is_overwritten(self) -> bool:
        """True if its gradient is its next value."""
        return self.kind is ParamKind.OVERWRITTEN

    @property
    def is_expert(self) -> bool:
        """True if each rank on `ep` has experts of its own in it."""
        return self.split.expert_dim is not None

    @property
    def is_staged(self) -> bool:
        """True if pipeline stages split its stack."""
        return self.split.is_staged

    @property
    def block_dim(self) -> int:
        """Dim of the blocks, counted from the end; not split over data axes."""
        if self.split.dim != len(self.shape) - 1:
            return -1
        # The last dim is split. In step layout the one before it is the factor of tp.
        return -3 if self.split.is_factored else -2

    @property
    def ndim_in_unit(self) -> int:
        """Number of dims of the slice that its unit computes with."""
        return len(self.shape) - self.num_stacked

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape in which it is split."""
        return self.split.padded(self.shape)

    @property
    def is_padded(self) -> bool:
        """True if it is split in a shape other than its own."""
        return self.split.is_padded

    @property
    def logical_spec(self) -> PartitionSpec:
        """Stored spec of the array in its logical shape: a padded dim is not split."""
        staged = self.is_staged and not self.split.stage_padding
        split = dataclasses.replace(self.split, is_staged=staged)
        axes = () if self.split.padding else self.placements.optimizer
        return split.spec(axes, tp=True)

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Returns the spec that splits `split.dim` over data axes, without `tp`."""
        return self.split.spec(axes)

    def spec_with_tp(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Returns the spec that splits over data axes `axes` and over `tp`."""
        return self.split.spec(axes, tp=True)

    def step_layout(self, tp: int) -> ParamPlan:
        """Returns the plan in step layout, where data axes and `tp` split two dims.

        If they split one dim, each rank of tp has a contiguous part of it, and data
        axes split that part: a gather over them restores the part without a
        permutation. So the dim is factored in two, `(tp, rest)`.
        """
        dim = self.split.dim
        if dim is None or dim != self.split.tensor_dim:
            return self
        shape = (*self.shape[:dim], tp, self.shape[dim] // tp, *self.shape[dim + 1 :])
        return dataclasses.replace(self, shape=shape, split=self.split.factored())

    def num_elements(self, mesh: Mesh, axes: tuple[str, ...]) -> int:
        """Returns its elements on one device if split over `axes`, padding included."""
        split = self.split if axes else dataclasses.replace(self.split, padding=0)
        return math.prod(split.on_device(mesh, split.padded(self.shape), axes))

    def stored_bytes(self, mesh: Mesh) -> int:
        """Returns its bytes on one device as stored, padding included."""
        elements = self.num_elements(mesh, self.placements.optimizer)
        return elements * self.precision.main_params.itemsize

    def deferred_axes(self, data_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the `data_axes` over which a microbatch leaves its gradient partial.

        Never `ep` for experts: the tokens of all its ranks have been sent to them.
        Never `pp` for a parameter that only one stage has.
        """
        done = {*self.placements.gradient}
        done |= {"ep"} if self.is_expert else set()
        done |= {"pp"} if self.is_staged else set()
        return tuple(axis for axis in data_axes if axis not in done)
