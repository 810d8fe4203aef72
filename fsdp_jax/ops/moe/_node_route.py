"""Route on which one copy of a token goes to each node, and one sum comes back."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from fsdp_jax.ops.moe._all_to_all import Exchange, Segments, exchange, segments_of
from fsdp_jax.ops.moe._gather_rows import rearrange
from fsdp_jax.ops.moe._nodes import Nodes
from fsdp_jax.ops.moe._repeat_rows import repeat_rows, sum_rows
from fsdp_jax.ops.moe._routes import RECEIVED, CapacityRoute, Rows, Tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NodeRoute:
    """Route of `CapacityRoute`, in two stages.

    First a rank sends each token once to each node with an expert that it chose, to the
    rank of its own index there. That rank then sends copies of it to the ranks of its
    node, in the slots of the experts. Back, it adds the outputs of a token, and sends
    one row. So a token crosses the network once a node, in place of once an expert.

    Arrays of slots are by rank in this node, expert of that rank, node of the token,
    and capacity.

    Attributes:
      direct: Route from rank to rank of the same slots, for one number of each choice.
      token: Token of each row that is sent; out of range for none.
      sent_rows: Rows that are sent of each token.
      there_sizes: Row counts to the nodes.
      back_sizes: Row counts of the way back.
      row: Received row of each slot; out of range for an empty one.
      slots: Slots of each received row.
      nodes: Layout of the ranks on nodes.
      form: Static shapes of the exchange between nodes.
    """

    direct: CapacityRoute
    token: Int[Array, " sent"]
    sent_rows: Int[Array, "tokens nodes"]
    there_sizes: Segments
    back_sizes: Segments
    row: Int[Array, " slots"]
    slots: Int[Array, "received most"]
    nodes: Nodes = dataclasses.field(metadata={"static": True})
    form: Exchange = dataclasses.field(metadata={"static": True})

    def there(self, rows: Rows, *, again: bool = False) -> Rows:
        """Sends tokens to the experts that they chose, sorted by expert."""
        rows = repeat_rows(rows, self.token, self.sent_rows)
        form = dataclasses.replace(self.form, again=again)
        rows = exchange(form, self.there_sizes, self.back_sizes, rows)
        # Before copies are made: the slots of a node hold several for a token.
        rows = checkpoint_name(rows, RECEIVED)
        rows = repeat_rows(rows, self.row, self.slots)
        rows = self.nodes.all_to_all(rows, self.nodes.within)
        index, local, node, capacity = self._dims
        # By index of the source in its node, to rows by expert and rank of the source.
        rows = rows.reshape(index, local, node, capacity, -1).transpose(1, 2, 0, 3, 4)
        return rows.reshape(len(self.row), -1)

    def per_choice(self, x: Tokens) -> Rows:
        """Returns one row of each token: copies are made where they are sent."""
        return x

    def summed(self, out: Rows, weights: Float[Array, "tokens chosen"]) -> Tokens:
        """Sends outputs back, and adds those of a token in each node and at the end.

        Sums are in float32, each rounded to the dtype of `out`.
        """
        return self._summed(out, self._weights(weights))

    def back(self, rows: Rows) -> Rows:
        """Sends rows back, and adds those of a token."""
        return self._summed(rows, None)

    def by_token(self, rows: Rows) -> Float[Array, "tokens 1 embed"]:
        """Returns sums by token, as of one choice."""
        return rows[:, None]

    def _summed(
        self, out: Rows, weights: Float[Array, "received most"] | None
    ) -> Tokens:
        index, local, node, capacity = self._dims
        rows = out.reshape(local, node, index, capacity, -1).transpose(2, 0, 1, 3, 4)
        rows = rows.reshape(len(self.row), -1)
        rows = self.nodes.all_to_all(rows, self.nodes.within)
        sums = sum_rows(rows, self.slots, weights)
        form = self.form.reversed
        received: Rows = exchange(form, self.back_sizes, self.there_sizes, sums)
        return sum_rows(received, self.sent_rows)

    @property
    def _dims(self) -> tuple[int, int, int, int]:
        """Ranks in a node, experts of a rank, nodes, and slots of an expert."""
        direct = self.direct
        return self.nodes.size, direct.local, self.nodes.count, direct.capacity

    def _weights(
        self, weights: Float[Array, "tokens chosen"]
    ) -> Float[Array, "received most"]:
        """Returns the weights of the slots of each received row."""
        direct = self.direct
        flat = rearrange(direct.flat(weights), direct.item, direct.slot)[:, 0]
        flat = self.nodes.all_to_all(flat, self.nodes.across)
        return jnp.take(
            by_slot(flat, self._dims), self.slots, mode="fill", fill_value=0
        )


def by_slot(numbers: Array, dims: tuple[int, int, int, int]) -> Array:
    """Orders numbers from each node like the slots of a `NodeRoute`."""
    index, local, node, capacity = dims
    return numbers.reshape(node, index * local, capacity).swapaxes(0, 1).reshape(-1)


def node_route(direct: CapacityRoute, nodes: Nodes) -> NodeRoute:
    """Makes the route in two stages of the slots of a direct one.

    Args:
      direct: Route from rank to rank.
      nodes: Layout of the ranks on nodes; no token has slots on more than
        `nodes.most`.
    """
    most = min(nodes.most, direct.chosen)
    on_node = direct.local * nodes.size * direct.capacity  # slots on a node
    choices = direct.slot.reshape(direct.chosen, -1).T
    # Each choice's node; the number of nodes for a dropped one.
    node = choices // on_node
    wanted = (node[..., None] == jnp.arange(nodes.count)[None, None]).any(1)
    counts = wanted.sum(0, dtype=jnp.int32)
    position = jnp.cumsum(wanted, axis=0, dtype=jnp.int32) - wanted
    tokens = len(choices)
    form = Exchange(
        axis=nodes.axis,
        rows=tokens * most,
        most=min(tokens, on_node),
        room=nodes.count * min(tokens, on_node),
        groups=nodes.across,
    )
    starts = jnp.cumsum(counts) - counts
    sent = jnp.where(wanted, starts[None] + position, form.rows)
    token = jnp.full(form.rows, tokens, jnp.int32)
    token = token.at[sent].set(
        jnp.arange(tokens, dtype=jnp.int32)[:, None], mode="drop"
    )
    places = _places_of_slots(direct, nodes, node, position)
    pairs, places = _exchange_layout(counts, places, nodes)
    there, back = segments_of(pairs, nodes.node)
    row, slots = _slots_of_rows(places, direct, nodes, there, form)
    # Sorted, the rows of a token precede the places of nodes without it.
    sent_rows = jnp.sort(sent, axis=1)[:, :most]
    return NodeRoute(direct, token, sent_rows, there, back, row, slots, nodes, form)


def _places_of_slots(
    direct: CapacityRoute,
    nodes: Nodes,
    node: Int[Array, "tokens chosen"],
    position: Int[Array, "tokens nodes"],
) -> Int[Array, "nodes slots"]:
    """Returns, for each slot of each node, what it is filled with from this rank.

    Per slot the position of its row among those that this rank sends there, and the
    slot's place among those of that row, as one number; -1 for an empty one.
    """
    most = direct.chosen  # A token may name an expert more than once.
    before = jnp.tril(node[:, :, None] == node[:, None, :], -1).sum(-1)
    own = jnp.take_along_axis(position, node, axis=1, mode="fill", fill_value=0)
    entry = (own * most + before).astype(jnp.int32).T.reshape(-1)
    entry = jnp.take(entry, direct.item, mode="fill", fill_value=-1)
    return entry.reshape(nodes.count, -1)


def _exchange_layout(
    counts: Int[Array, " nodes"], places: Int[Array, "nodes slots"], nodes: Nodes
) -> tuple[Int[Array, "nodes nodes"], Int[Array, "nodes slots"]]:
    """Sends each node the row counts from this rank to all nodes, and the places there.

    In one all-to-all of equal parts, which precedes that of the rows: XLA merges
    all-gathers and all-reduces of independent parts of a batch, and each part would
    wait for the counts of all; and a second small one would wait for rows on the way.

    Returns:
      Rows from and to each node, of ranks of this rank's index, and the places from
      each node.
    """
    copies = jnp.broadcast_to(counts[None], (nodes.count, nodes.count))
    layout = jnp.concatenate([copies, places], axis=1)
    layout = nodes.all_to_all(layout.reshape(-1), nodes.across)
    layout = layout.reshape(nodes.count, -1)
    return layout[:, : nodes.count], layout[:, nodes.count :]


def _slots_of_rows(
    places: Int[Array, "nodes slots"],
    direct: CapacityRoute,
    nodes: Nodes,
    there: Segments,
    form: Exchange,
) -> tuple[Int[Array, " slots"], Int[Array, "received most"]]:
    """Returns the received row of each slot, and the slots of each received row.

    Args:
      places: What fills the slots, from each node, see `_places_of_slots`.
      direct: Route from rank to rank.
      nodes: Layout of the ranks on nodes.
      there: Row counts to the nodes.
      form: Static shapes of the exchange between nodes.
    """
    most = direct.chosen
    starts = jnp.cumsum(there.received) - there.received
    entry = jnp.where(places < 0, form.room * most, places + starts[:, None] * most)
    dims = nodes.size, direct.local, nodes.count, direct.capacity
    entry = by_slot(entry, dims)
    slots = jnp.full(form.room * most, entry.size, jnp.int32)
    numbers = jnp.arange(entry.size, dtype=jnp.int32)
    slots = slots.at[entry].set(numbers, mode="drop").reshape(form.room, most)
    return entry // most, slots
