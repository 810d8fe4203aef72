"""Helpers shared by ring and all-gather attention."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from fsdp_jax.ops.attention._blockwise import (
    BlockConfig,
    KeyValueBlocks,
    Pairs,
    QueryBlocks,
    block_of,
    blocks_of_heads,
    blocks_of_ids,
    pairs_of_chunks,
)
from fsdp_jax.ops.attention._zigzag import check_chunks, chunks_of, ranks_along

# `bridge.models` gives the residuals of fused attention the same name, so that one
# `remat_policy` saves both. Neither package imports the other: a test compares them.
RESIDUALS = "context_attention"
"""`checkpoint_name` of the forward results that the backward pass needs."""


def block_config(
    length: int, scale: float, softcap: float | None, axis: str
) -> BlockConfig:
    """Returns the config of attention on a rank with `length` tokens of a row.

    Args:
      length: Number of tokens of a rank.
      scale: Factor of the scores.
      softcap: Bound of the scores, by tanh; None for none.
      axis: Mesh axis that splits rows; where it is not manual, rows are unsharded.
    """
    if (ranks := ranks_along(axis)) == 1:
        return BlockConfig(scale, softcap, block_of(length))
    check_chunks({"attention": length * ranks}, ranks)
    return BlockConfig(scale, softcap, block_of(length // 2))


def as_window(window: Any) -> Array | None:
    """Returns a window as an array; refuses a number of less than one token.

    Args:
      window: Tokens that a query sees, an int or `int[]`; None for all before it.
    """
    if window is not None and not isinstance(window, Array) and not 1 <= window:
        raise ValueError(
            f"window={window!r}: a query sees at least 1 token, its own; None for all "
            "before it."
        )
    return None if window is None else jnp.asarray(window, jnp.int32)


def to_blocks(
    config: BlockConfig,
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None,
    window: Any,
    sinks: Array | None,
) -> tuple[QueryBlocks, KeyValueBlocks, Array | None]:
    """Reshapes the arguments of an attention into blocks.

    Args:
      config: Static parameters of the attention.
      query: Queries, `[batch, seq, heads, head_dim]`.
      key: Keys, `[batch, seq, kv_heads, head_dim]`.
      value: Values, `[batch, seq, kv_heads, v_head_dim]`.
      segment_ids: Segment ids, `int[batch, seq]`; None for one document per row.
      window: Tokens that a query sees, an int or `int[]`; None for all before it.
      sinks: Scores per head without a value, `[heads]`; None for none.

    Returns:
      Queries, keys with values, and sinks `[kv_heads, rows]`.
    """
    block, groups = config.block, key.shape[2]
    query, key, value = (jnp.asarray(heads) for heads in (query, key, value))
    segments = blocks_of_ids(segment_ids, block)
    queries = QueryBlocks(
        blocks_of_heads(query, block, groups),
        segments,
        as_window(window),
    )
    keys = KeyValueBlocks(
        blocks_of_heads(key, block, groups),
        blocks_of_heads(value, block, groups),
        segments,
    )
    if sinks is not None:
        # One sink per row of a block, in the layout of `rows`: head-major within a
        # group.
        sinks = jnp.repeat(sinks, block).reshape(groups, -1)
    return queries, keys, sinks


def name_residuals(out: Array, log_sum: Array, dtype: Any) -> tuple[Array, Array]:
    """Applies `checkpoint_name` to residuals, so that a remat policy can save them.

    Args:
      out: Attention output of any layout, stored as `dtype`.
      log_sum: Log-sum-exp of the scores of each query.
      dtype: Dtype of the values.
    """
    return checkpoint_name(out.astype(dtype), RESIDUALS), checkpoint_name(
        log_sum, RESIDUALS
    )


def triangles(config: BlockConfig, rank: Array, ranks: int, length: int) -> Pairs:
    """Returns the causal pairs of the queries of each chunk with its own keys.

    Args:
      config: Static parameters of the attention.
      rank: Index of this rank along the axis.
      ranks: Number of ranks along the axis; with one, the row is one chunk.
      length: Number of tokens of a rank.
    """
    if ranks == 1:
        only_chunk = (np.zeros(1, np.int32), np.zeros(1, np.int32))
        return pairs_of_chunks(
            only_chunk, only_chunk, length, config.block, triangle=True
        )
    both = jnp.arange(2), chunks_of(rank, ranks)
    return pairs_of_chunks(both, both, length // 2, config.block, triangle=True)
