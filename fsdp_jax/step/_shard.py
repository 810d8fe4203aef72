"""A weight as the model holds it inside the step: one device's piece, not gathered."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from fsdp_jax._tree import PyTree
from fsdp_jax.lora._composed_weight import Derived
from fsdp_jax.sharding._plan import ParamPlan


@dataclasses.dataclass(frozen=True)
class Late:
    """What happens to a gradient on its way out, besides the reduce-scatter.

    Attributes:
      scale: What it is multiplied by before it travels: one over the ranks and
        microbatches whose losses are averaged.
      axes: Data axes over which it is reduced besides, in the same backward; empty
        where that is left for after the last microbatch.
    """

    scale: float = 1.0
    axes: tuple[str, ...] = ()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("value", "sink", "earlier"),
    meta_fields=("row", "late"),
)
@dataclasses.dataclass(frozen=True)
class Shard:
    """Stands in a model's tree where a unit's weight would be.

    Being a pytree of arrays it is sliced by scans and stacked by maps like the weight
    itself. Whoever computes with it outside its unit gets an error that says so: the
    whole weight exists only while its unit runs.

    The gradient leaves through `sink`, not through `value`. So its dtype and its
    placement need not be those of the weight, which is what separates ZeRO-2 from
    ZeRO-3 and bfloat16 weights from float32 gradients.

    Attributes:
      value: This device's piece as it lies within the step, shape `[*stacked, ...]`.
      sink: Zeros in the shape and dtype in which the gradient leaves; unread. None if
        the parameter is frozen.
      earlier: What earlier microbatches accumulated, where backward is to add it and
        to finish the gradient; None otherwise.
      row: The parameter's plan.
      late: How the gradient is scaled and finished, see `Late`.
    """

    value: Any
    sink: Any
    earlier: Any
    row: ParamPlan
    late: Late

    @property
    def num_stacked(self) -> int:
        """Stack dims that are left."""
        return self.value.ndim - self.row.ndim_in_unit

    @property
    def is_slice(self) -> bool:
        """Whether all stack dims have been sliced away: the weight of one unit."""
        return self.num_stacked <= 0

    def __jax_array__(self) -> NoReturn:
        """Refuses to be used as the whole weight."""
        raise ValueError(self._misused())

    def __getattr__(self, attribute: str) -> NoReturn:
        """Refuses `.T`, `.reshape` and the like with the same explanation."""
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise AttributeError(self._misused())

    def __getitem__(self, index: Any) -> NoReturn:
        """Refuses to be sliced by hand: scan over it, or mark the function."""
        raise ValueError(self._misused())

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValueError(self._misused())

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __neg__ = __len__ = __iter__ = _refuse
    __array_ufunc__ = None  # numpy leaves `array @ shard` to `__rmatmul__`.

    def _misused(self) -> str:
        return (
            f"'{self.row.name}' belongs to unit '{self.row.unit}' and is used outside "
            "of it, where only this device's shard exists. Use it in the unit's "
            "__call__, mark the function that uses it with fsdp.unit or fsdp.scan, or "
            "leave it out of `units`, so that it is gathered at the entry of the loss."
        )


def is_shard(node: Any) -> bool:
    """Whether `node` is a `Shard`, or `Derived` of several."""
    return isinstance(node, (Shard, Derived))


def shards_of(tree: PyTree) -> list[Any]:
    """Every `Shard` in `tree`, and what is `Derived` of them, in leaf order."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(leaf)]


def partition(
    tree: PyTree, keep: Callable[[Any], bool] = lambda _: False
) -> tuple[list[Any], list[Any], Callable[[Sequence[Any], Sequence[Any]], PyTree]]:
    """Takes the shards of a unit out of a tree.

    Args:
      tree: Any pytree.
      keep: Nodes that are left as they are, with the shards in them.

    Returns:
      The shards, but those of units within the unit: these are gathered when they are
      entered themselves; everything else; and `merge(weights, others)`, which puts
      whole weights where the shards were.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda n: is_shard(n) or keep(n))
    units = {leaf.row.unit for leaf in leaves if is_shard(leaf)}
    taken = [is_shard(leaf) and not _is_within(leaf.row.unit, units) for leaf in leaves]

    def merge(weights: Sequence[Any], others: Sequence[Any]) -> PyTree:
        weight, other = iter(weights), iter(others)
        return treedef.unflatten(next(weight) if t else next(other) for t in taken)

    shards = [leaf for leaf, t in zip(leaves, taken, strict=True) if t]
    others = [leaf for leaf, t in zip(leaves, taken, strict=True) if not t]
    return shards, others, merge


def _is_within(unit: str, units: set[str]) -> bool:
    return any(unit.startswith(f"{outer}.") for outer in units)
