"""Dims of one parameter that mesh axes split."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax.sharding import Mesh, PartitionSpec

from fsdp_jax.sharding._mesh import num_devices


@dataclasses.dataclass(frozen=True)
class ParamSplit:
    """Dims of a parameter that mesh axes split, and the zeros that this needs.

    Indices of dims count the stacked dims too.

    Attributes:
      dim: Dim that is split over data axes; None if it is not split over them.
      padding: Zeros at the end of `dim` where it is split, because the devices do not
        divide it.
      tensor_dim: Dim that is split over `tp`, or None.
      expert_dim: Dim that is split over `ep` all the time, or None: each rank there
        computes with experts of its own.
      is_staged: True if the first dim, the stack, is split over `pp`: each pipeline
        stage stores consecutive layers, see `Stages` for those that it runs.
      stage_padding: Layers of zeros after the last one, where the stack is split.
      is_factored: True if `dim` and `tensor_dim` were one dim and are two in this
        form, which `ParamPlan.step_layout` returns.

    Examples:
      >>> split = fsdp.sharding.ParamSplit(dim=1, tensor_dim=2)
      >>> split.spec(("dp_shard",), tp=True)
      PartitionSpec(None, 'dp_shard', 'tp')
    """

    dim: int | None = None
    padding: int = 0
    tensor_dim: int | None = None
    expert_dim: int | None = None
    is_staged: bool = False
    stage_padding: int = 0
    is_factored: bool = False

    def padded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in which an array of `shape` is split."""
        padded = list(shape)
        if self.dim is not None:
            padded[self.dim] += self.padding
        if self.is_staged:
            padded[0] += self.stage_padding
        return tuple(padded)

    @property
    def is_padded(self) -> bool:
        """True if the array is split in a shape other than its own."""
        return bool(self.padding or self.stage_padding)

    def spec(self, axes: tuple[str, ...], *, tp: bool = False) -> PartitionSpec:
        """Returns the spec that splits `dim` over data axes.

        Args:
          axes: Data axes that split `dim`; none if empty.
          tp: Whether `tensor_dim` is split over `tp` too.
        """
        split = {self.dim: axes} if self.dim is not None and axes else {}
        if self.expert_dim is not None:
            split[self.expert_dim] = ("ep",)
        if self.is_staged:
            split[0] = ("pp",)
        if tp and self.tensor_dim is not None:
            split[self.tensor_dim] = ("tp", *split.get(self.tensor_dim, ()))
        return spec_of_split(split)

    def on_device(
        self, mesh: Mesh, shape: tuple[int, ...], axes: tuple[str, ...]
    ) -> tuple[int, ...]:
        """Returns the dims of `shape` on one device.

        Args:
          mesh: Device mesh.
          shape: Padded shape.
          axes: Data axes that split `dim`.
        """
        dims = list(shape)
        for dim, devices in (
            (self.dim, num_devices(mesh, axes)),
            (self.tensor_dim, mesh.shape["tp"]),
            (self.expert_dim, mesh.shape["ep"]),
            (0 if self.is_staged else None, mesh.shape["pp"]),
        ):
            if dim is not None:
                dims[dim] //= devices
        return tuple(dims)

    def factored(self) -> ParamSplit:
        """Returns the split of the same array with `dim` as two dims, `(tp, rest)`.

        Raises:
          ValueError: If `dim` is not `tensor_dim`.
        """
        dim = self.dim
        if dim is None or dim != self.tensor_dim:
            raise ValueError(
                f"dim={dim} and tensor_dim={self.tensor_dim} are not one dim, so there "
                "is nothing to factor."
            )
        expert_dim = self.expert_dim
        if expert_dim is not None:
            expert_dim += expert_dim > dim
        return dataclasses.replace(
            self, dim=dim + 1, expert_dim=expert_dim, is_factored=True
        )


def spec_of_split(split: Mapping[int, tuple[str, ...]]) -> PartitionSpec:
    """Returns the spec of an array.

    Args:
      split: Dim -> mesh axes that split it; none of them empty.
    """
    dims = [split.get(dim) for dim in range(max(split, default=-1) + 1)]
    # One axis as its name: jax takes P("x") and P(("x",)) for different specs.
    return PartitionSpec(*(d[0] if d and len(d) == 1 else d for d in dims))
