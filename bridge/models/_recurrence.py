"""Signature and default of how the decoder runs mixers with a state."""

from collections.abc import Callable
from typing import Protocol

from jaxtyping import Array, Float, Int

Mixes = Callable[
    [Float[Array, "batch seq embed"], Int[Array, "batch seq"] | None],
    Float[Array, "batch seq embed"],
]
"""A mixer of normed hidden states, by segment."""


class Recurrence(Protocol):
    """Signature of a function that runs a mixer over rows."""

    def __call__(
        self,
        mixer: Mixes,
        x: Float[Array, "batch seq embed"],
        segment_ids: Int[Array, "batch seq"] | None,
    ) -> Float[Array, "batch seq embed"]:
        """Returns what `mixer(x, segment_ids)` is for rows in the order of the text."""
        ...


def plain_recurrence(
    mixer: Mixes,
    x: Float[Array, "batch seq embed"],
    segment_ids: Int[Array, "batch seq"] | None,
) -> Float[Array, "batch seq embed"]:
    """Runs a mixer on rows that each device has whole: the decoder's default.

    Args:
      mixer: Mixer with a state, which passes from token to token.
      x: Normed hidden states.
      segment_ids: Segment of each token; None if a row is one segment.
    """
    return mixer(x, segment_ids)
