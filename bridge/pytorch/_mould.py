"""Moulds: the weights of whatever holds them, by path, and the way back in."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from bridge._tree import named_leaves


@dataclasses.dataclass(frozen=True)
class Mould:
    """The weights of a model or tree.

    Args:
      leaves: Arrays, or what has shape and dtype, by dotted path.
      fill: Takes an array for each path and returns what the leaves were taken from,
        with these arrays in their places; it changes nothing in place.
    """

    leaves: dict[str, Any]
    fill: Callable[[Mapping[str, Any]], Any]

    @property
    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of each leaf; None where it is nowhere yet."""
        return {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)
            )
            for name, leaf in self.leaves.items()
        }


def read_mould(tree: Any) -> Mould:
    """Finds the weights of a model or tree.

    A random state of flax.nnx is no weight, and neither is a leaf that is no array
    (equinox keeps functions and flags among its leaves): `fill` returns them as they
    are.

    Args:
      tree: A flax.nnx model or `nnx.State`, an equinox module, linen's variables, or
        any pytree; of arrays or of `jax.ShapeDtypeStruct`.
    """
    if isinstance(tree, nnx.Module):
        graph, state = nnx.split(tree)
        mould = read_mould(state)
        return Mould(mould.leaves, lambda a: nnx.merge(graph, mould.fill(a)))
    if isinstance(tree, nnx.State):
        weights, rest = nnx.split_state(tree, nnx.Not(nnx.RngState), ...)
        mould = _of_pytree(weights)
        return Mould(mould.leaves, lambda a: nnx.merge_state(mould.fill(a), rest))
    return _of_pytree(tree)


def _of_pytree(tree: Any) -> Mould:
    # None is no leaf to jax, and so neither counted nor named.
    arrays = jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, tree)
    leaves = named_leaves(arrays)
    flat, structure = jax.tree.flatten(tree)

    def fill(values: Mapping[str, Any]) -> Any:
        filled = (values[name] for name in leaves)
        return structure.unflatten(
            [next(filled) if _is_array(leaf) else leaf for leaf in flat]
        )

    return Mould(leaves, fill)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
