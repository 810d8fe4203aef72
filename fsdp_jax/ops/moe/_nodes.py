"""Nodes of the ranks that share experts, and all-to-alls across and within them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from fsdp_jax.ops.moe._all_to_all import Groups, send_slices


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Layout of the ranks of a mesh axis on nodes; consecutive ranks share a node.

    Attributes:
      axis: Mesh axis, manual here.
      count: Number of nodes, at least 2.
      size: Number of ranks of the axis in a node.
      most: Maximum number of nodes that a token is sent to.
    """

    axis: str
    count: int
    size: int
    most: int

    @property
    def across(self) -> Groups:
        """Ranks of equal index, one a node, by that index."""
        return tuple(zip(*self.within, strict=True))

    @property
    def within(self) -> Groups:
        """Ranks of each node."""
        starts = range(0, self.count * self.size, self.size)
        return tuple(tuple(range(start, start + self.size)) for start in starts)

    @property
    def node(self) -> Int[Array, ""]:
        """Node of this rank."""
        return lax.axis_index(self.axis) // self.size

    def all_to_all(self, rows: Array, groups: Groups) -> Array:
        """Sends equal parts of the leading dim to the ranks of a group, in order."""

        def send(rows: Array) -> Array:
            return lax.all_to_all(
                rows, self.axis, 0, 0, axis_index_groups=groups, tiled=True
            )

        return send_slices(send, rows) if rows.ndim > 1 else send(rows)


def nodes_of(
    axis: str, ranks: int, ranks_per_node: int | None, nodes_per_token: int | None
) -> Nodes | None:
    """Returns the nodes of the ranks on an axis, or None to send tokens directly.

    Args:
      axis: Mesh axis.
      ranks: Number of ranks on it.
      ranks_per_node: Number of consecutive ranks in a node; None to send directly.
      nodes_per_token: Maximum number of nodes that a token is sent to; None for all.

    Raises:
      ValueError: If a number is less than 1, or `ranks_per_node` does not divide the
        ranks.
    """
    given = {"ranks_per_node": ranks_per_node, "nodes_per_token": nodes_per_token}
    wrong = [
        f"{name}={number} must be at least 1"
        for name, number in given.items()
        if number is not None and number < 1
    ]
    if nodes_per_token is not None and ranks_per_node is None:
        wrong.append(
            f"nodes_per_token={nodes_per_token} has no effect without ranks_per_node"
        )
    if wrong:
        raise ValueError(f"Dispatch by node: {'; '.join(wrong)}.")
    if ranks_per_node is None or ranks <= ranks_per_node:
        return None
    if ranks % ranks_per_node:
        raise ValueError(
            f"ranks_per_node={ranks_per_node} does not divide the {ranks} ranks on "
            f"'{axis}'. Pass the number of consecutive ranks on '{axis}' in a node, or "
            "None."
        )
    count = ranks // ranks_per_node
    return Nodes(axis, count, ranks_per_node, min(nodes_per_token or count, count))


def within_limit(
    nodes: Int[Array, "tokens chosen"], limit: int
) -> Bool[Array, "tokens chosen"]:
    """Returns which choices are on the first `limit` nodes of each token.

    Args:
      nodes: Node of each choice; earlier choices have precedence.
      limit: Number of nodes that a token may be sent to.
    """
    same = nodes[:, :, None] == nodes[:, None, :]
    is_new = ~jnp.tril(same, -1).any(-1)
    # The nodes up to the first choice of the same node.
    first = jnp.argmax(same, axis=-1)
    return jnp.take_along_axis(jnp.cumsum(is_new, axis=-1), first, axis=-1) <= limit
