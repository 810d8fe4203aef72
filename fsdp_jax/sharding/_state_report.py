"""What a plan says of a model's arrays that are not parameters, and of empty ones."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from fsdp_jax._tree import PyTree, named_leaves

_SHOWN = 5


def state_lines(params: PyTree, state: PyTree) -> list[str]:
    """Returns the lines of a plan's text; none for parameters alone.

    Args:
      params: Abstract parameters.
      state: Abstract arrays that are not parameters.
    """
    arrays = named_leaves(state)
    empty = [name for name, x in [*named_leaves(params), *arrays] if 0 in x.shape]
    old_keys = [name for name, x in arrays if _is_old_key(x)]
    said = {
        "arrays, not parameters: {}": [name for name, _ in arrays],
        "keys that are others in each step and on each rank: {}; one that is to keep "
        "its numbers is stored as jax.random.key_data(key)": _loose_keys(state),
        "perhaps keys of jax.random.PRNGKey, which no step or rank is folded into: {}; "
        "jax.random.key makes keys that it is folded into": old_keys,
        "no elements, which a checkpoint cannot hold: {}": empty,
    }
    return [line.format(_listed(names)) for line, names in said.items() if names]


def _loose_keys(state: PyTree) -> list[str]:
    """Returns the keys that are not of an nnx random stream, which says what it is."""

    def is_stream(node: object) -> bool:
        return isinstance(node, nnx.RngState)

    streams = {
        id(leaf)
        for node in jax.tree.leaves(state, is_leaf=is_stream)
        if is_stream(node)
        for leaf in jax.tree.leaves(node)
    }
    return [
        name
        for name, leaf in named_leaves(state)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) and id(leaf) not in streams
    ]


def _is_old_key(leaf: jax.ShapeDtypeStruct) -> bool:
    """Returns whether an array looks like a key of before typed keys."""
    return leaf.shape == (2,) and leaf.dtype == jnp.uint32


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
