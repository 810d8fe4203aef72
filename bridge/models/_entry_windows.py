"""Windows of tokens of which entries are made, in rows of one text or of several."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bridge.models._positions import positions_in_order, text_starts


class EntryWindows(NamedTuple):
    """Full windows of the texts of packed rows, in the order of the row.

    Attributes:
      tokens: Index in the row of each token of a window.
      is_full: Whether there is such a window; a row of several texts has fewer than
        one of a single text.
      follows: Whether the window before it is of the same text.
      segment: Segment of the window's text.
    """

    tokens: Int[Array, "batch entries rate"]
    is_full: Bool[Array, "batch entries"]
    follows: Bool[Array, "batch entries"]
    segment: Int[Array, "batch entries"]

    def gather(
        self, x: Float[Array, "batch seq width"]
    ) -> Float[Array, "batch entries rate width"]:
        """Returns the tokens of each window.

        Args:
          x: Values of all tokens.
        """
        flat = self.tokens.reshape(len(self.tokens), -1, 1)
        taken = jnp.take_along_axis(x, flat, axis=1)
        return taken.reshape(*self.tokens.shape, x.shape[-1])

    def starts(
        self, x: Float[Array, "#batch seq width"]
    ) -> Float[Array, "batch entries width"]:
        """Returns the first token of each window.

        Args:
          x: Values of all tokens.
        """
        x = jnp.broadcast_to(x, (len(self.tokens), *x.shape[1:]))
        return jnp.take_along_axis(x, self.tokens[..., :1], axis=1)

    def visible(
        self, segment_ids: Int[Array, "batch seq"]
    ) -> Bool[Array, "batch seq entries"]:
        """Returns the windows of each token's text that end at the token or before.

        Args:
          segment_ids: Segment of each token.
        """
        rows = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
        ended = self.tokens[:, None, :, -1] <= rows[None, :, None]
        same = jnp.equal(self.segment[:, None], segment_ids[:, :, None])
        return ended & same & self.is_full[:, None]


def windows_of_texts(segment_ids: Int[Array, "batch seq"], rate: int) -> EntryWindows:
    """Returns the full windows of each text of packed rows; each begins with its text.

    Args:
      segment_ids: Segment of each token; those of a text are consecutive.
      rate: Number of tokens of a window.
    """
    seq, rows = segment_ids.shape[1], positions_in_order(segment_ids)
    count = rows - text_starts(segment_ids) + 1
    is_end = count % rate == 0
    # Ends first, in their order: a stable sort.
    ends = jnp.argsort(~is_end, axis=1, stable=True)[:, : seq // rate]
    is_full = jnp.take_along_axis(is_end, ends, axis=1)
    ends = jnp.where(is_full, ends, rate - 1).astype(jnp.int32)
    behind = jnp.arange(rate - 1, -1, -1, dtype=jnp.int32)
    tokens = ends[..., None] - behind[None, None]
    return EntryWindows(
        tokens,
        is_full,
        jnp.take_along_axis(count, ends, axis=1) > rate,
        jnp.take_along_axis(segment_ids, ends, axis=1),
    )
