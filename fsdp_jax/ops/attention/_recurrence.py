"""Context-parallel recurrent mixers (Mamba, gated delta net, linear attention).

They all-gather the row and run the mixer unsharded.
"""

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
Mixer = Callable[
    [Float[Array, "batch seq embed"], Segments], Float[Array, "batch seq embed"]
]


def all_gather_recurrence(
    mixer: Mixer,
    x: Float[Array, "batch seq embed"],
    segment_ids: Segments,
    *,
    axis: str = "cp",
) -> Float[Array, "batch seq embed"]:
    """Runs a recurrent mixer over rows whose tokens are split over `axis`.

    Each rank all-gathers the row, runs the mixer on it in the order of the text, and
    keeps the outputs of its own tokens; gradients are reduce-scattered. Every rank
    computes the whole mixer and stores its activations: `cp` saves compute and memory
    in attention and MLP layers only. Rows are in the order of `zigzag`.

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

        def gather_row(part: Array) -> Array:
            gathered = lax.all_gather(part, axis, axis=1, tiled=True)
            return inverse_zigzag(gathered, ranks)

        segments = None if segment_ids is None else gather_row(segment_ids)
        out = zigzag(mixer(gather_row(x), segments), ranks)
        return lax.dynamic_slice_in_dim(out, lax.axis_index(axis) * seq, seq, axis=1)
