"""Helpers shared by ring and all-gather attention."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from fsdp_jax.ops.attention._blockwise import (
    Asked,
    Form,
    Keys,
    Pairs,
    block_of,
    blocks_of_heads,
    blocks_of_ids,
    pairs_of_chunks,
)
from fsdp_jax.ops.attention._zigzag import check_chunks, chunks_of, ranks_along

SAVED = "context_attention"
"""`checkpoint_name` of the forward results that the backward pass needs."""


def form_of(length: int, scale: float, softcap: float | None, axis: str) -> Form:
    """Returns the `Form` of attention on a rank with `length` tokens of a row."""
    if (ranks := ranks_along(axis)) == 1:
        return Form(scale, softcap, block_of(length))
    check_chunks({"attention": length * ranks}, ranks)
    return Form(scale, softcap, block_of(length // 2))


def cut(
    form: Form,
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None,
    window: Any,
    sinks: Array | None,
) -> tuple[Asked, Keys, Array | None]:
    """Reshapes the arguments of an attention into blocks."""
    block, groups = form.block, key.shape[2]
    query, key, value = (jnp.asarray(heads) for heads in (query, key, value))
    segments = blocks_of_ids(segment_ids, block)
    asked = Asked(
        blocks_of_heads(query, block, groups),
        segments,
        None if window is None else jnp.asarray(window, jnp.int32),
    )
    keys = Keys(
        blocks_of_heads(key, block, groups),
        blocks_of_heads(value, block, groups),
        segments,
    )
    if sinks is not None:
        # One sink per row of a block, in the layout of `rows`: head-major within a
        # group.
        sinks = jnp.repeat(sinks, block).reshape(groups, -1)
    return asked, keys, sinks


def named(mixed: Array, log_sum: Array, dtype: Any) -> tuple[Array, Array]:
    """Applies `checkpoint_name` to residuals, so that a remat policy can save them."""
    return checkpoint_name(mixed.astype(dtype), SAVED), checkpoint_name(log_sum, SAVED)


def triangles(form: Form, rank: Array, ranks: int, length: int) -> Pairs:
    """Returns the causal pairs of the queries of each chunk with its own keys.

    Args:
      form: Static parameters of the attention.
      rank: Index of this rank along the axis.
      ranks: Number of ranks along the axis; with one, the row is one chunk.
      length: Number of tokens of a rank.
    """
    if ranks == 1:
        whole = (np.zeros(1, np.int32), np.zeros(1, np.int32))
        return pairs_of_chunks(whole, whole, length, form.block, triangle=True)
    both = jnp.arange(2), chunks_of(rank, ranks)
    return pairs_of_chunks(both, both, length // 2, form.block, triangle=True)
