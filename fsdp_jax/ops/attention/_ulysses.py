"""Ulysses attention: all-to-alls over `cp` exchange tokens for heads and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from fsdp_jax._scopes import ULYSSES_ATTENTION
from fsdp_jax.ops.attention._heads import check_heads, repeat_heads
from fsdp_jax.ops.attention._zigzag import (
    check_chunks,
    inverse_zigzag,
    ranks_along,
    zigzag,
)

Attention = Callable[..., Array]


def ulysses_attention(attention: Attention, *, axis: str = "cp") -> Attention:
    """Wraps an attention function to run on whole rows of each rank's heads.

    An all-to-all over `axis` exchanges tokens for heads before it, and another one
    after it does the reverse, so that any kernel for whole rows can be used. Rows are
    in the order of `zigzag`, as for the other algorithms, and are permuted to the order
    of the text for the kernel.

    Keys and values whose heads the ranks do not divide are repeated until they do; the
    gradients of copies are summed.

    Args:
      attention: Attention function, as `bridge.models.dot_product_attention`.
      axis: Mesh axis. Where it is not manual, `attention` is called unchanged.

    Returns:
      A function of the same arguments, for this rank's tokens. It raises a `ValueError`
      if the ranks do not divide the query heads, or the tokens into chunks.

    Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
    """

    def whole_rows(
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads v_head_dim"],
        *,
        scale: float,
        segment_ids: Int[Array, "batch seq"] | None = None,
        window: Any = None,
        softcap: float | None = None,
        sinks: Float[Array, " heads"] | None = None,
    ) -> Float[Array, "batch seq heads v_head_dim"]:
        how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        ranks = ranks_along(axis)
        if ranks == 1:
            return attention(
                query, key, value, segment_ids=segment_ids, sinks=sinks, **how
            )
        check_chunks({"attention": query.shape[1] * ranks}, ranks)
        check_heads(query.shape[2], ranks, axis, "ring_attention, or ")
        with jax.named_scope(ULYSSES_ATTENTION):
            heads = (query, *(repeat_heads(x, ranks) for x in (key, value)))
            query, key, value = (_to_rows(x, ranks, axis) for x in heads)
            if segment_ids is not None:
                segment_ids = lax.all_gather(segment_ids, axis, axis=1, tiled=True)
                segment_ids = inverse_zigzag(segment_ids, ranks)
            if sinks is not None:
                # The all-to-all gives rank i the i-th contiguous group of query heads.
                own = sinks.reshape(ranks, -1)
                sinks = own[lax.axis_index(axis)]
            mixed = attention(
                query, key, value, segment_ids=segment_ids, sinks=sinks, **how
            )
            return lax.all_to_all(
                zigzag(mixed, ranks), axis, split_axis=1, concat_axis=2, tiled=True
            )

    return whole_rows


def _to_rows(heads: Array, ranks: int, axis: str) -> Array:
    """Returns this rank's heads of all tokens, in the order of the text."""
    rows = lax.all_to_all(heads, axis, split_axis=2, concat_axis=1, tiled=True)
    return inverse_zigzag(rows, ranks)
