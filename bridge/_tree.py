"""Dotted names of a tree's leaves, such as `layers.self_attn.q_proj.kernel`."""

from typing import Any

import jax
from flax import nnx


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of any pytree by dotted path, in the tree's order.

    The `.value` at the end of a flax variable's path is dropped, so that a tree of
    variables and a tree of arrays have the same names.

    Args:
      tree: Nested dicts, an `nnx.State`, a module that is a pytree, ...

    Raises:
      ValueError: If two leaves have the same name, or one has no shape and dtype.
    """
    leaves: dict[str, Any] = {}
    wrong = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if path and path[-1] == jax.tree_util.GetAttrKey("value"):
            path = path[:-1]
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in leaves:
            wrong.append(f"  {name}: two leaves have this name; rename one of them")
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            wrong.append(f"  {name}: a {type(leaf).__name__} has no shape and dtype")
        leaves[name] = leaf
    if wrong:
        raise ValueError("The tree cannot be read by path:\n" + "\n".join(wrong))
    return leaves


def arrays_of(tree: Any) -> Any:
    """Converts nodes that implement `__jax_array__` to arrays.

    `fsdp_jax.Padded` is one: a leaf of a train state that is stored with trailing
    zero padding, which is not part of the weight.

    Args:
      tree: Pytree of arrays and of such nodes.
    """

    def stands_for_one(node: Any) -> bool:
        is_known = isinstance(node, (jax.Array, nnx.Variable))
        return (
            hasattr(node, "__jax_array__") and hasattr(node, "shape") and not is_known
        )

    return jax.tree.map(
        lambda leaf: leaf.__jax_array__() if stands_for_one(leaf) else leaf,
        tree,
        is_leaf=stands_for_one,
    )
