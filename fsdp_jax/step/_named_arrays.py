"""haliax's named arrays of shards, which its `scan` and `fold` take apart.

haliax loops over a stack by calling methods of each `NamedArray` in it: `rearrange`,
which moves the axis of the stack to the front, and `take`, for the structure of one
layer. On the array itself these are operations that no shard allows.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import jax

from fsdp_jax._tree import PyTree
from fsdp_jax.lora._composed_weight import Derived
from fsdp_jax.step._shard import Shard, is_shard


def with_scannable_shards(tree: PyTree) -> PyTree:
    """Replaces the named arrays of shards by those that haliax can loop over.

    Args:
      tree: Any pytree; returned as it is if nothing has imported haliax.
    """
    haliax = sys.modules.get("haliax")
    if haliax is None:
        return tree

    def is_named(node):
        return isinstance(node, haliax.NamedArray)

    def replaced(node):
        if not is_named(node) or not is_shard(node.array):
            return node
        array = node.array
        shaped = _ShapedDerived if isinstance(array, Derived) else _ShapedShard
        fields = {f.name: getattr(array, f.name) for f in dataclasses.fields(array)}
        return _scannable(haliax.NamedArray)(shaped(**fields), node.axes)

    return jax.tree.map(replaced, tree, is_leaf=lambda n: is_named(n) or is_shard(n))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("value", "grad_buffer", "accumulated_grad"),
    meta_fields=("param", "reduction"),
)
@dataclasses.dataclass(frozen=True)
class _ShapedShard(Shard):
    """A shard that tells its shape: haliax compares the lengths of what it scans."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, with the stacked dims that are left."""
        return _shape(self)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("parts", "key"),
    meta_fields=("recipe",),
)
@dataclasses.dataclass(frozen=True)
class _ShapedDerived(Derived):
    """A weight of several parameters that tells the shape of the first of them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, with the stacked dims that are left."""
        return _shape(self.parts[0])


def _shape(shard: Shard) -> tuple[int, ...]:
    stacked = jax.tree.leaves(shard.value)[0].shape[: shard.num_stacked]
    return (*stacked, *shard.param.shape[shard.param.num_stacked :])


@functools.cache
def _scannable(named_array: type) -> type:
    """Makes the subclass of `haliax.NamedArray` whose array may be a stack of shards.

    Args:
      named_array: `haliax.NamedArray`, which is not imported here: it is optional.
    """

    class ScannableArray(named_array):
        """Named array that loops over its first axis without reading its elements."""

        def rearrange(self, *args: Any, **kwargs: Any) -> Any:
            if not is_shard(self.array):
                return super().rearrange(*args, **kwargs)
            self._check_first(args[0][0] if args and not kwargs else None)
            return self

        def take(self, axis: Any, index: Any) -> Any:
            if not is_shard(self.array):
                return super().take(axis, index)
            self._check_first(axis)
            part = jax.tree.map(lambda leaf: leaf[index], self.array)
            return type(self)(part, self.axes[1:])

        def _check_first(self, axis: Any) -> None:
            if getattr(axis, "name", axis) != self.axes[0].name:
                raise ValueError(
                    f"'{self.array.param.name}' {self.axes} belongs to unit "
                    f"'{self.array.param.unit}' and is rearranged outside of it, where "
                    "only this device's shard exists. Only a loop over the first axis "
                    f"may do so, {self.axes[0].name}: rearrange it inside the unit."
                )

    return jax.tree_util.register_pytree_node_class(ScannableArray)
