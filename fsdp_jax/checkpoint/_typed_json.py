"""JSON encoding that preserves tuples, bytes, numpy values and any dict keys.

Pickle is not used: loading an untrusted checkpoint must not execute code.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax._tree import PyTree, named_leaves

_TUPLE, _BYTES, _ITEMS = "__tuple__", "__bytes__", "__items__"
_SCALAR, _ARRAY, _TREE = "__scalar__", "__array__", "__tree__"
_TAGS = {_TUPLE, _BYTES, _ITEMS, _SCALAR, _ARRAY, _TREE}


def encode(
    value: Any, where: str = "metadata", trees: dict[str, PyTree] | None = None
) -> Any:
    """Encodes a value in JSON types.

    Args:
      value: Tree of lists, tuples and dicts, with leaves of None, bool, int, float,
        str, bytes, and numpy scalars and arrays in any dtype of jax.
      where: Name of the value in messages.
      trees: Output dict of the jax arrays in `value` and the trees of them, by dotted
        name; their encoding is the name. None to refuse jax arrays.

    Raises:
      ValueError: If `value` contains another type; lists all of them.
    """
    walk = _Walk(where, trees)
    try:
        encoded = walk.encode(value, ())
    except RecursionError as error:
        raise ValueError(f"{where}: it is nested too deeply to be saved.") from error
    if walk.problems:
        raise ValueError(
            f"Cannot save {len(walk.problems)} value(s) as JSON:\n  "
            + "\n  ".join(walk.problems)
            + "\nMake them numbers, strings, bytes, numpy arrays, lists, tuples or "
            "dicts."
        )
    return encoded


def decode(value: Any, trees: Mapping[str, PyTree] | None = None) -> Any:
    """Decodes a value; inverse of `encode`.

    Args:
      value: Encoded value.
      trees: Arrays and trees by the names that `encode` gave them.

    Raises:
      KeyError: If a name is not in `trees`.
      ValueError, TypeError, RecursionError: If `encode` did not write it.
    """
    if isinstance(value, list):
        return [decode(item, trees) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"__tuple__": items}:
            return tuple(decode(item, trees) for item in items)
        case {"__bytes__": text}:
            return base64.b64decode(text)
        case {"__items__": pairs}:
            return {decode(key): decode(item, trees) for key, item in pairs}
        case {"__scalar__": [dtype, text]}:
            return _array(dtype, (), text)[()]
        case {"__array__": [dtype, shape, text]}:
            return _array(dtype, shape, text)
        case {"__tree__": name}:
            return (trees or {})[name]
    return {key: decode(item, trees) for key, item in value.items()}


@dataclasses.dataclass
class _Walk:
    """Recursive encoder that collects values it cannot encode."""

    where: str
    trees: dict[str, PyTree] | None
    problems: list[str] = dataclasses.field(default_factory=list)

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        # Exact types only: a subclass (a named tuple, an enum) would be decoded as its
        # base class.
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is bytes:
            return {_BYTES: _text(value)}
        if type(value) in (list, tuple):
            items = [self.encode(x, (*path, i)) for i, x in enumerate(value)]
            return items if type(value) is list else {_TUPLE: items}
        if type(value) is dict:
            return self._encode_dict(value, path)
        if isinstance(value, np.generic) and _is_number(value.dtype):
            return {_SCALAR: [value.dtype.name, _text(value.tobytes())]}
        if type(value) is np.ndarray and _is_number(value.dtype):
            shape = list(value.shape)
            return {_ARRAY: [value.dtype.name, shape, _text(value.tobytes())]}
        if self.trees is not None and _is_tree_of_arrays(value):
            return self._encode_tree(value, ".".join(map(str, (self.where, *path))))
        at = self.where + "".join(f"[{key!r}]" for key in path)
        self.problems.append(f"{at}: {type(value).__name__}")
        return None

    def _encode_tree(self, value: PyTree, name: str) -> dict[str, str]:
        assert self.trees is not None
        if name in self.trees:
            self.problems.append(f"{name}: two arrays under one name")
        self.trees[name] = value
        return {_TREE: name}

    def _encode_dict(self, value: dict, path: tuple[Any, ...]) -> dict[str, Any]:
        items = {key: self.encode(x, (*path, key)) for key, x in value.items()}
        # JSON keys are strings, and a user's key must not look like a tag.
        if all(type(key) is str and key not in _TAGS for key in items):
            return items
        keys = [self._encode_key(key, path) for key in items]
        return {_ITEMS: [list(pair) for pair in zip(keys, items.values(), strict=True)]}

    def _encode_key(self, key: Any, path: tuple[Any, ...]) -> Any:
        walk = _Walk(f"a key of {self.where}", None)
        encoded = walk.encode(key, (*path, key))
        self.problems += walk.problems
        return encoded


def _is_tree_of_arrays(value: Any) -> bool:
    leaves = [leaf for _, leaf in named_leaves(value)]
    return all(isinstance(leaf, jax.Array) for leaf in leaves)


def _is_number(dtype: np.dtype) -> bool:
    """Returns whether a dtype is equal on every machine; long doubles are not."""
    known = jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_
    return known and dtype.isnative and dtype.char not in "gG"


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _array(dtype: str, shape: Sequence[int], text: str) -> np.ndarray:
    kind = jnp.dtype(dtype)
    if not _is_number(kind):
        raise ValueError(f"an array of {dtype}")
    values = np.frombuffer(base64.b64decode(text), kind)
    return values.reshape(shape).copy()  # `frombuffer` returns a read-only array.
