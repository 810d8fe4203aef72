"""Names of leaves: one dotted path, whatever library made the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from flax import nnx
from jax import tree_util

PyTree = Any


class WholeLeaf:
    """A pytree node around arrays that counts as one leaf, as `nnx.Variable` does."""


_LEAVES = (nnx.Variable, WholeLeaf)


def leaf_name(path: Sequence[Any]) -> str:
    """The dotted name of a `jax.tree_util` key path, e.g. `layers.0.attn.q.kernel`."""
    return ".".join(_component(key) for key in path)


def named_leaves(
    tree: PyTree, is_leaf: Callable[[Any], bool] = lambda _: False
) -> list[tuple[str, Any]]:
    """Every leaf with its dotted name, in the order of `jax.tree.leaves`.

    An nnx `Variable` counts as its value: its key path would end in `.value`, which is
    no part of anybody's name for a weight. A `WholeLeaf` counts as one, of its
    logical shape. `is_leaf` may stop the walk elsewhere too.
    """
    flat, _ = tree_util.tree_flatten_with_path(
        tree,
        is_leaf=lambda n: isinstance(n, _LEAVES) or is_leaf(n),
    )
    named = [
        (leaf_name(path), leaf.get_value() if _is_variable(leaf) else leaf)
        for path, leaf in flat
    ]
    return [(name, leaf) for name, leaf in named if leaf is not None]


def matches(pattern: str, name: str) -> str | None:
    """The leading part of `name` that `pattern` matches component by component.

    `layers.*` matches `layers.0` of `layers.0.mlp.kernel`; `*` never spans a dot.
    """
    wanted, have = pattern.split("."), name.split(".")
    if len(wanted) > len(have):
        return None
    head = have[: len(wanted)]
    ok = all(fnmatchcase(h, w) for h, w in zip(head, wanted, strict=True))
    return ".".join(head) if ok else None


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _component(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
