"""Routes of tokens to the ranks of their experts and back, for one set of choices."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from fsdp_jax.ops.moe._all_to_all import Exchange, Segments, exchange, send_slices
from fsdp_jax.ops.moe._gather_rows import rearrange

Rows = Float[Array, "rows embed"]
Tokens = Float[Array, "tokens embed"]
Index = Int[Array, " rows"]
RECEIVED = "received_tokens"
"""`checkpoint_name` of tokens as they come from other ranks, in what they are sent in.

A `remat_policy` that saves them by that name does not send them again in backward.
"""


class Route(Protocol):
    """A pytree of the arrays that a route needs; its methods differ in direction alone.

    Rows are in the order of the route here, and `[room, embed]` where they are sorted
    by the experts of this rank.
    """

    @property
    def direct(self) -> ChoiceRoute:
        """Route from rank to rank, for one number of each choice."""
        ...

    def per_choice(self, x: Tokens) -> Rows:
        """Repeats each token for each of its rows."""
        ...

    def by_token(self, rows: Rows) -> Float[Array, "tokens rows_of_token embed"]:
        """Returns rows by the token that they belong to."""
        ...

    def there(self, rows: Rows, *, again: bool = False) -> Rows:
        """Sends rows to the ranks of their experts.

        Args:
          rows: Rows of tokens, or of gradients.
          again: Whether others are sent there in the same pass.
        """
        ...

    def back(self, rows: Rows) -> Rows:
        """Sends rows back to the ranks of their tokens; zeros for dropped ones."""
        ...

    def summed(self, out: Rows, weights: Float[Array, "tokens chosen"]) -> Tokens:
        """Sends outputs back, and returns their weighted sums by token.

        Sums are in float32, rounded to the dtype of `out`.
        """
        ...


class ChoiceRoute(Route, Protocol):
    """A route with a row for each expert that a token chose."""

    def flat(self, choices: Float[Array, "tokens chosen"]) -> Float[Array, "rows 1"]:
        """Returns one number of each choice as rows."""
        ...


def _weighted(
    route: Route, out: Rows, weights: Float[Array, "tokens chosen"]
) -> Tokens:
    wide = jnp.promote_types(out.dtype, jnp.float32)
    rows = route.by_token(route.back(out)).astype(wide)
    return jnp.einsum("tce,tc->te", rows, weights.astype(wide)).astype(out.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedRoute:
    """Route by which no token is dropped; ranks receive different numbers of rows.

    Attributes:
      order: Choice of each row that is sent, sorted by expert.
      inverse: Row of each choice.
      there_sizes: Row counts to the experts; None where all experts are here.
      back_sizes: Row counts of the way back.
      by_expert: Received row of each row by expert.
      by_source: Row by expert of each received row.
      chosen: Number of experts that a token chose.
      form: Static shapes of the exchange.
    """

    order: Index
    inverse: Index
    there_sizes: Segments | None
    back_sizes: Segments | None
    by_expert: Index | None
    by_source: Index | None
    chosen: int = dataclasses.field(metadata={"static": True})
    form: Exchange | None = dataclasses.field(metadata={"static": True})

    @property
    def direct(self) -> RaggedRoute:
        return self

    def summed(self, out: Rows, weights: Float[Array, "tokens chosen"]) -> Tokens:
        return _weighted(self, out, weights)

    def per_choice(self, x: Tokens) -> Rows:
        return jnp.repeat(x, self.chosen, axis=0)

    def flat(self, choices: Float[Array, "tokens chosen"]) -> Float[Array, "rows 1"]:
        return choices.reshape(-1, 1)

    def by_token(self, rows: Rows) -> Float[Array, "tokens chosen embed"]:
        return rows.reshape(-1, self.chosen, rows.shape[-1])

    def there(self, rows: Rows, *, again: bool = False) -> Rows:
        rows = rearrange(rows, self.order, self.inverse)
        if self.form is None:
            return rows
        form = dataclasses.replace(self.form, again=again)
        received = exchange(form, self.there_sizes, self.back_sizes, rows)
        received = checkpoint_name(received, RECEIVED)
        # Received rows are sorted by source rank, then expert.
        return rearrange(received, self.by_expert, self.by_source)

    def back(self, rows: Rows) -> Rows:
        if self.form is not None:
            rows = rearrange(rows, self.by_source, self.by_expert)
            form = self.form.reversed
            rows = exchange(form, self.back_sizes, self.there_sizes, rows)
        return rearrange(rows, self.inverse, self.order)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CapacityRoute:
    """Route of a fixed number of rows from each rank to each expert.

    Rows are choice-major, so that all first choices precede all second ones.

    Attributes:
      item: Choice in each slot of an expert.
      slot: Slot of each choice; out of range for a dropped one.
      chosen: Number of experts that a token chose.
      ranks: Number of ranks that share the experts.
      local: Number of experts of a rank.
      capacity: Number of slots of an expert for each rank.
      axis: Mesh axis over which experts are split.
    """

    item: Index
    slot: Index
    chosen: int = dataclasses.field(metadata={"static": True})
    ranks: int = dataclasses.field(metadata={"static": True})
    local: int = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})
    axis: str = dataclasses.field(metadata={"static": True})

    @property
    def direct(self) -> CapacityRoute:
        return self

    def summed(self, out: Rows, weights: Float[Array, "tokens chosen"]) -> Tokens:
        return _weighted(self, out, weights)

    def per_choice(self, x: Tokens) -> Rows:
        return jnp.tile(x, (self.chosen, 1))

    def flat(self, choices: Float[Array, "tokens chosen"]) -> Float[Array, "rows 1"]:
        return choices.T.reshape(-1, 1)

    def by_token(self, rows: Rows) -> Float[Array, "tokens chosen embed"]:
        return rows.reshape(self.chosen, -1, rows.shape[-1]).swapaxes(0, 1)

    def there(self, rows: Rows, *, again: bool = False) -> Rows:
        del again
        rows = rearrange(rows, self.item, self.slot)
        if self.ranks == 1:
            return rows
        rows = checkpoint_name(self._all_to_all(rows), RECEIVED)
        rows = rows.reshape(self.ranks, self.local, self.capacity, -1).swapaxes(0, 1)
        return rows.reshape(self.ranks * self.local * self.capacity, -1)

    def back(self, rows: Rows) -> Rows:
        if self.ranks > 1:
            shape = (self.local, self.ranks, self.capacity, -1)
            rows = rows.reshape(shape).swapaxes(0, 1)
            rows = rows.reshape(self.ranks * self.local * self.capacity, -1)
            rows = self._all_to_all(rows)
        return rearrange(rows, self.slot, self.item)

    def _all_to_all(self, rows: Rows) -> Rows:
        def send(rows: Rows) -> Rows:
            return lax.all_to_all(
                rows, self.axis, split_axis=0, concat_axis=0, tiled=True
            )

        return send_slices(send, rows)
