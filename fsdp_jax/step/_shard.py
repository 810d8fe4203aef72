"""`Shard`: one device's piece of a weight, which a model holds in a step."""

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
class GradReduction:
    """The scale of a gradient, and its deferred reduction.

    Attributes:
      scale: Factor applied before the reduce-scatter: one over the number of ranks and
        microbatches whose losses are averaged.
      axes: Data axes of the deferred reduction if the same backward is to run it; empty
        if it runs after the last microbatch.
    """

    scale: float = 1.0
    axes: tuple[str, ...] = ()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("value", "grad_buffer", "accumulated_grad"),
    meta_fields=("param", "reduction"),
)
@dataclasses.dataclass(frozen=True)
class Shard:
    """A placeholder for a unit's weight in a model's tree.

    It is a pytree of arrays, so scans slice it and maps stack it like the weight.
    Computing with it outside its unit raises an error, since the unsharded weight
    exists only while its unit runs.

    The gradient is the cotangent of `grad_buffer`, not of `value`. So its dtype and its
    placement are independent of the weight's, which ZeRO-2 (split gradients of
    unsplit weights) and float32 gradients of bfloat16 weights need.

    Attributes:
      value: This device's piece in its placement within the step, `[*stacked, ...]`.
      grad_buffer: Zeros in the shape and dtype of the gradient buffer, never read.
        None if the parameter is frozen or the loss is not differentiated.
      accumulated_grad: Gradient accumulated over earlier microbatches, if backward is
        to add it and finish the gradient; else None.
      param: Plan of the parameter.
      reduction: Scale and deferred reduction of the gradient.
    """

    value: Any
    grad_buffer: Any
    accumulated_grad: Any
    param: ParamPlan
    reduction: GradReduction

    @property
    def num_stacked(self) -> int:
        """Number of stacked dims left."""
        return self.value.ndim - self.param.ndim_in_unit

    @property
    def is_slice(self) -> bool:
        """Whether all stack dims have been sliced away: the weight of one unit."""
        return self.num_stacked <= 0

    def __jax_array__(self) -> NoReturn:
        """Raises: a shard is not the unsharded weight."""
        raise ValueError(self._misused())

    def __getattr__(self, attribute: str) -> NoReturn:
        """Raises the same error for `.T`, `.reshape` and other array attributes."""
        # Protocol lookups (`copy`, `pickle`, jax) must find that it is missing.
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise _MisusedAttributeError(self._misused())

    def __getitem__(self, index: Any) -> NoReturn:
        """Raises: only a scan or a map may slice a shard."""
        raise ValueError(self._misused())

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValueError(self._misused())

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __neg__ = __len__ = __iter__ = _refuse
    __array_ufunc__ = None  # numpy leaves `array @ shard` to `__rmatmul__`.

    def _misused(self) -> str:
        return (
            f"'{self.param.name}' belongs to unit '{self.param.unit}' and is used "
            "outside of it, where only this device's shard exists. Use it in a method "
            "of the unit's class (one that `units` names, if it names methods; an nnx "
            "or equinox module is a unit by its class, units=[Block], and not by its "
            "path), mark the function that uses it with fsdp.unit or fsdp.scan, which "
            "gather the weights in its first argument alone (several in a tuple or a "
            "dict), or leave it out of `units`, so that it is gathered at the entry of "
            "the loss."
        )


class _MisusedAttributeError(ValueError, AttributeError):
    """A misuse that `hasattr` and `getattr` with a default take for what is missing."""


def is_shard(node: Any) -> bool:
    """Returns whether `node` is a `Shard`, or `Derived` of several."""
    return isinstance(node, (Shard, Derived))


def shards_of(tree: PyTree) -> list[Any]:
    """Returns every `Shard`, and every `Derived` of several, in leaf order."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(leaf)]


def partition(
    tree: PyTree, keep: Callable[[Any], bool] = lambda _: False
) -> tuple[list[Any], list[Any], Callable[[Sequence[Any], Sequence[Any]], PyTree]]:
    """Separates the shards of a unit from the rest of a tree.

    Args:
      tree: Any pytree.
      keep: Predicate of nodes that count as one leaf, with the shards in them.

    Returns:
      The shards, without those of units within the unit, which are gathered at their
      own entry; all other leaves; and `merge(weights, others)`, which rebuilds the tree
      with unsharded weights in the place of the shards.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda n: is_shard(n) or keep(n))
    # Of the units in the tree, those within another one of them are not taken.
    units = {leaf.param.unit for leaf in leaves if is_shard(leaf)}
    taken = [
        is_shard(leaf) and not _is_within(leaf.param.unit, units) for leaf in leaves
    ]

    def merge(weights: Sequence[Any], others: Sequence[Any]) -> PyTree:
        weight, other = iter(weights), iter(others)
        return treedef.unflatten(next(weight) if t else next(other) for t in taken)

    shards = [leaf for leaf, t in zip(leaves, taken, strict=True) if t]
    others = [leaf for leaf, t in zip(leaves, taken, strict=True) if not t]
    return shards, others, merge


def _is_within(unit: str, units: set[str]) -> bool:
    return any(unit.startswith(f"{outer}.") for outer in units)
