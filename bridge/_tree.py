"""Names of a tree's leaves: `layers.self_attn.q_proj.kernel`."""

from typing import Any

import jax


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of any pytree by dotted path, in the tree's order.

    The `.value` with which flax ends the path of a variable is dropped, so that a
    tree of variables and a tree of arrays name their leaves alike.

    Args:
      tree: Nested dicts, an `nnx.State`, a module that is a pytree, ...

    Raises:
      ValueError: If two leaves end up with one name, or one has no shape and dtype.
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
