"""Mixers with a state, such as Mamba, on rows whose tokens are split over `cp`."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from fsdp_jax._scopes import ALL_GATHER_RECURRENCE
from fsdp_jax.ops.attention._zigzag import (
    check_chunks,
    inverse_zigzag,
    ranks_along,
    zigzag,
)

Segments = Int[Array, "batch seq"] | None
Mixes = Callable[
    [Float[Array, "batch seq embed"], Segments], Float[Array, "batch seq embed"]
]


def all_gather_recurrence(
    mixer: Mixes,
    x: Float[Array, "batch seq embed"],
    segment_ids: Segments,
    *,
    axis: str = "cp",
) -> Float[Array, "batch seq embed"]:
    """Runs a mixer with a state over rows whose tokens are split over `axis`.

    Each rank all-gathers whole rows, runs the mixer on them in the order of the text,
    and keeps the outputs of its own tokens; gradients are reduce-scattered. Every rank
    thus computes the whole mixer, and holds its activations of whole rows: attention
    and MLPs of the other layers are what `axis` divides. Rows are in the order of
    `zigzag`.

    Args:
      mixer: Function of hidden states and segment ids, whose token sees those before
        it: `bridge.models.Decoder` passes those of its layers to its `recurrence`.
      x: Normed hidden states of this rank's tokens.
      segment_ids: Segment ids of this rank's tokens; None if a row is one segment.
      axis: Mesh axis. Where it is not manual, `mixer` is called unchanged.

    Returns:
      Outputs of this rank's tokens.

    Raises:
      ValueError: If a rank's part of a row does not divide into two chunks.
    """
    ranks, seq = ranks_along(axis), x.shape[1]
    if ranks == 1:
        return mixer(x, segment_ids)
    check_chunks({"rows": seq * ranks}, ranks)
    with jax.named_scope(ALL_GATHER_RECURRENCE):

        def whole(part: Array) -> Array:
            gathered = lax.all_gather(part, axis, axis=1, tiled=True)
            return inverse_zigzag(gathered, ranks)

        segments = None if segment_ids is None else whole(segment_ids)
        mixed = zigzag(mixer(whole(x), segments), ranks)
        return lax.dynamic_slice_in_dim(mixed, lax.axis_index(axis) * seq, seq, axis=1)
