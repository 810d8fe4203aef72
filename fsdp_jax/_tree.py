"""Dotted names of pytree leaves, equal for all model libraries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from flax import nnx
from jax import tree_util

PyTree = Any


class WholeLeaf:
    """Base of pytree nodes that count as one leaf, as `nnx.Variable` does."""


_LEAVES = (nnx.Variable, WholeLeaf)


def leaf_name(path: Sequence[Any]) -> str:
    """Returns the dotted name of a jax key path, e.g. `layers.0.attn.q.kernel`."""
    return ".".join(_component(key) for key in path)


def known_end(path: Sequence[Any], known: Collection[Any]) -> Any:
    """Returns the longest end of a key path that is in `known`; None if there is none.

    The path of an optimizer's moment ends in that of its parameter, since optax keeps
    trees like the parameters' in its own.
    """
    ends = (tuple(path[start:]) for start in range(len(path) + 1))
    return next((end for end in ends if end in known), None)


def named_leaves(
    tree: PyTree, is_leaf: Callable[[Any], bool] = lambda _: False
) -> list[tuple[str, Any]]:
    """Returns the leaves with their dotted names, in the order of `jax.tree.leaves`.

    An nnx `Variable` counts as its value, since its key path would end in `.value`,
    which is not part of a weight's name; one that holds a tree, as that tree. A
    `WholeLeaf` counts as one leaf, with its logical shape. Leaves that are None are
    left out, and Variables without a value, as optax masks them in its states.

    Args:
      tree: Any pytree.
      is_leaf: Further predicate for nodes that count as leaves.
    """
    flat, _ = tree_util.tree_flatten_with_path(
        tree,
        is_leaf=lambda n: isinstance(n, _LEAVES) or is_leaf(n),
    )
    return [named for path, leaf in flat for named in _within(leaf_name(path), leaf)]


def _within(name: str, leaf: Any) -> Iterable[tuple[str, Any]]:
    """Yields a leaf with its name: those of a Variable's tree, and none if it is None.

    Args:
      name: Name of the leaf.
      leaf: Variable, or anything that counts as a leaf.
    """
    value = _value(leaf)
    is_tree = _is_variable(leaf) and not isinstance(value, _LEAVES)
    if is_tree and not tree_util.all_leaves([value]):
        for inner, part in named_leaves(value):
            yield f"{name}.{inner}", part
    elif value is not None:
        yield name, value


def tree_differences(
    got: PyTree, want: PyTree, misfits: Callable[[str, Any, Any], Iterable[str]]
) -> list[str]:
    """Lists how a tree differs from the one that is wanted: missing leaves first.

    Args:
      got: Tree to check.
      want: Tree of abstract arrays.
      misfits: Lines on a leaf that both have, of `(name, got, want)`; none if it fits.
    """
    have, wanted = dict(named_leaves(got)), dict(named_leaves(want))
    lines = [f"missing: {_shown(n, x)}" for n, x in wanted.items() if n not in have]
    lines += [f"unexpected: {_shown(n, x)}" for n, x in have.items() if n not in wanted]
    for name, leaf in wanted.items():
        if name in have:
            lines += misfits(name, have[name], leaf)
    return lines


def _shown(name: str, leaf: Any) -> str:
    return f"{name} {tuple(leaf.shape)}" if hasattr(leaf, "shape") else name


def as_patterns(owner: str, option: str, patterns: Any) -> tuple[str, ...]:
    """Returns the patterns as a tuple.

    Raises:
      ValueError: If they are a lone string, which would be iterated by letter, or no
        sequence of strings.
    """
    if isinstance(patterns, str):
        raise ValueError(
            f"{owner}({option}={patterns!r}) must be a sequence of path patterns: "
            f"write {option}=({patterns!r},)."
        )
    is_sequence = isinstance(patterns, Iterable) and not isinstance(patterns, Mapping)
    found = tuple(patterns) if is_sequence else ()
    if not is_sequence or not all(isinstance(pattern, str) for pattern in found):
        raise ValueError(
            f"{owner}({option}={found or patterns!r}) must be a sequence of path "
            "patterns, which are strings."
        )
    return found


def matches(pattern: str, name: str) -> str | None:
    """Returns the leading part of `name` that `pattern` matches by component, or None.

    `layers.*` matches `layers.0` of `layers.0.mlp.kernel`; `*` never spans a dot, and
    `**` is any number of components: `**.bias` matches `layers.0.mlp.bias`. The part is
    the shortest that matches.
    """
    wanted, have = pattern.split("."), name.split(".")
    heads = (have[:end] for end in range(1, len(have) + 1))
    return next((".".join(head) for head in heads if _fits(wanted, head)), None)


def _fits(wanted: Sequence[str], have: Sequence[str]) -> bool:
    if not wanted:
        return not have
    first, rest = wanted[0], wanted[1:]
    if first == "**":
        return any(_fits(rest, have[start:]) for start in range(len(have) + 1))
    return bool(have) and fnmatchcase(have[0], first) and _fits(rest, have[1:])


def unmatched(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Returns the patterns that match none of `names`: they are misspelled."""
    return [p for p in patterns if all(matches(p, name) is None for name in names)]


def _value(leaf: Any) -> Any:
    """Returns the value of a Variable, None without one; anything else as it is."""
    if not _is_variable(leaf):
        return leaf
    value = leaf.get_value()
    parts = tree_util.tree_leaves(value, is_leaf=lambda n: isinstance(n, _LEAVES))
    return value if parts else None


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _component(key: Any) -> str:
    # Attributes of jax's key types: DictKey, GetAttrKey and SequenceKey.
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
