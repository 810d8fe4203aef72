"""Parts of a batch that a layer runs side by side, so that one hides the other."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class BatchParts(NamedTuple):
    """Carry of a loop over layers, in parts of the batch's rows.

    Apart from the first layer to the last: joined between layers, no part could begin
    the next layer, or the one before it in backward, while another is in this one.

    Attributes:
      parts: Carry of each part.
    """

    parts: tuple[Any, ...]

    def with_rows(self, tree: Any) -> list[tuple[Any, Any]]:
        """Returns each part beside its rows of a tree, as split by `split_rows`."""
        rows = sum(len(jax.tree.leaves(part)[0]) for part in self.parts)
        own = split_rows(tree, rows, len(self.parts))
        return list(zip(self.parts, own, strict=True))


def split_carry(carry: Any, rows: int, parts: int) -> Any:
    """Returns the carry in parts, or as it is if there is but one.

    Args:
      carry: Tree whose arrays have the batch as their first dim.
      rows: Rows of the batch.
      parts: Number of parts, as for `split_rows`.
    """
    if min(parts, rows) == 1:
        return carry
    return BatchParts(tuple(split_rows(carry, rows, parts)))


def join_carry(carry: Any) -> Any:
    """Returns the carry of all rows, from one that may be in parts."""
    return join_rows(carry.parts) if isinstance(carry, BatchParts) else carry


def split_rows(tree: Any, rows: int, parts: int) -> list[Any]:
    """Splits the arrays of a tree along their first dim.

    Args:
      tree: Arrays whose first dim is the batch, and arrays that all rows share, whose
        first dim is another.
      rows: Rows of the batch.
      parts: Number of parts; of fewer rows, each is a part. Where they do not divide
        the rows, the first parts have one row more.

    Returns:
      One tree per part.
    """
    parts = min(parts, rows)
    size, more = divmod(rows, parts)
    sizes = [size + (part < more) for part in range(parts)]

    def parts_of(leaf: Any) -> list[Any]:
        if getattr(leaf, "ndim", 0) and leaf.shape[0] == rows:
            # Not slices, whose gradients would be padded to all rows and added: each
            # part's would then wait for the others'.
            return list(jax.lax.split(leaf, sizes))
        return [leaf] * parts

    leaves, treedef = jax.tree.flatten(tree)
    split = [parts_of(leaf) for leaf in leaves]
    return [treedef.unflatten([own[part] for own in split]) for part in range(parts)]


def join_rows(parts: Sequence[Any]) -> Any:
    """Concatenates the arrays of trees along their first dim.

    Args:
      parts: Trees of arrays, whose first dim is the batch.
    """
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
