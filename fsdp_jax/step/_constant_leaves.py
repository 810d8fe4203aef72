"""Leaves of a stack that are not arrays: constants that all its units have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from fsdp_jax._tree import PyTree


def without_constants(
    tree: PyTree,
) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """Separates the arrays of a tree, which a loop slices, from its constants.

    A module of equinox keeps numbers and functions among its leaves, such as the rate
    of a `Dropout`; made by `filter_vmap`, a stack of modules has one for all of them.

    Args:
      tree: Any pytree.

    Returns:
      The arrays; and `whole(arrays)`, which rebuilds the tree with slices of them, or
      others, in their place.
    """
    leaves, treedef = jax.tree.flatten(tree)
    constants = [None if hasattr(leaf, "shape") else (leaf,) for leaf in leaves]

    def whole(arrays: Sequence[Any]) -> PyTree:
        given = iter(arrays)
        return treedef.unflatten(
            next(given) if constant is None else constant[0] for constant in constants
        )

    arrays = [x for x, c in zip(leaves, constants, strict=True) if c is None]
    return arrays, whole
