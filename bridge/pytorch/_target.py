"""Weights of a model or pytree by path, and a function to replace them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from bridge._tree import named_leaves


@dataclasses.dataclass(frozen=True)
class Target:
    """Weights of a model or pytree.

    Args:
      leaves: Concrete or abstract arrays by dotted path.
      fill: Function from arrays by path to a copy of the model or pytree with these
        arrays as leaves.
    """

    leaves: dict[str, Any]
    fill: Callable[[Mapping[str, Any]], Any]

    @property
    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract array of each leaf; its sharding is None if the leaf has none."""
        return {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)
            )
            for name, leaf in self.leaves.items()
        }


def read_target(tree: Any) -> Target:
    """Finds the weights of a model or pytree.

    Random states of flax.nnx and leaves that are not arrays (equinox has functions and
    flags among its leaves) are not weights: `fill` returns them unchanged.

    Args:
      tree: A flax.nnx model or `nnx.State`, an equinox module, linen variables, or
        any pytree; with arrays or `jax.ShapeDtypeStruct`s as leaves.
    """
    if isinstance(tree, nnx.Module):
        graph, state = nnx.split(tree)
        inner = read_target(state)
        return Target(inner.leaves, lambda a: nnx.merge(graph, inner.fill(a)))
    if isinstance(tree, nnx.State):
        weights, rest = nnx.split_state(tree, nnx.Not(nnx.RngState), ...)
        inner = _of_pytree(weights)
        return Target(inner.leaves, lambda a: nnx.merge_state(inner.fill(a), rest))
    return _of_pytree(tree)


def _of_pytree(tree: Any) -> Target:
    # jax does not treat None as a leaf, so non-arrays get neither name nor position.
    arrays = jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, tree)
    leaves = named_leaves(arrays)
    flat, structure = jax.tree.flatten(tree)

    def fill(values: Mapping[str, Any]) -> Any:
        filled = (values[name] for name in leaves)
        return structure.unflatten(
            [next(filled) if _is_array(leaf) else leaf for leaf in flat]
        )

    return Target(leaves, fill)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
