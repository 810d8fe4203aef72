"""Context-parallel attention that all-gathers keys and values over `cp`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fsdp_jax._scopes import ALL_GATHER_ATTENTION
from fsdp_jax.ops.attention._blockwise import (
    BlockConfig,
    KeyValueBlocks,
    Pairs,
    QueryBlocks,
    SinkBlocks,
    attend,
    attend_backward,
    backward_inputs,
    block_sinks_grad,
    finalize_softmax,
    heads_of_blocks,
    init_softmax,
    pairs_of_chunks,
    zero_grads,
)
from fsdp_jax.ops.attention._common import (
    block_config,
    name_residuals,
    to_blocks,
    triangles,
)
from fsdp_jax.ops.attention._zigzag import chunks_of, ranks_along


def all_gather_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads v_head_dim"],
    *,
    scale: float,
    segment_ids: Int[Array, "batch seq"] | None = None,
    window: int | Int[Array, ""] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    axis: str = "cp",
) -> Float[Array, "batch seq heads v_head_dim"]:
    """Computes causal attention over rows whose tokens are split over `axis`.

    Each rank all-gathers the keys and values of whole rows and attends to them with its
    own queries: one collective per layer instead of a ring of them, at the memory of
    whole rows of keys and values, which are small with grouped heads. Their gradients
    are reduce-scattered in the dtype of the keys, where `ring_attention` sums those of
    all ranks in float32. Rows are in the order of `zigzag`.

    Args:
      query: Queries of this rank, as in `ring_attention`, like all arguments below.
      key: Keys of this rank.
      value: Values of this rank.
      scale: Factor of the scores.
      segment_ids: Segment ids of documents packed in one row; None for one per row.
      window: Number of tokens that a query sees; None for all before it.
      softcap: Bound of the scores, by tanh; None for none.
      sinks: Scores per head that take part in the softmax without a value.
      axis: Mesh axis.

    Returns:
      The attention output of each query.

    Raises:
      ValueError: If a rank's part of a row does not divide into two chunks.

    Source: Llama 3, arXiv:2407.21783, section 3.3.2.
    """
    config, ranks = (
        block_config(query.shape[1], scale, softcap, axis),
        ranks_along(axis),
    )
    with jax.named_scope(ALL_GATHER_ATTENTION):
        queries, keys, sinks = to_blocks(
            config, query, key, value, segment_ids, window, sinks
        )
        rank = jnp.int32(0)
        if ranks > 1:
            rank = lax.axis_index(axis)
            keys = jax.tree.map(
                lambda x: lax.all_gather(x, axis, axis=0, tiled=True), keys
            )
        out: Any = _attend(config, ranks, queries, keys, sinks, rank)
        return heads_of_blocks(out, config.block)


def _pairs(
    config: BlockConfig, ranks: int, queries: QueryBlocks, rank: Array
) -> tuple[tuple[Pairs, bool], ...]:
    """Returns diagonal pairs, and full squares before them: equally many on each rank.

    The earlier chunk sees as many chunks as its index says, the later one the rest of
    `2 * ranks - 1`.
    """
    blocks = queries.query.shape[0]
    own = triangles(config, rank, ranks, blocks * config.block)
    if ranks == 1:
        return ((own, True),)
    chunks = chunks_of(rank, ranks)
    # Square i, 0 <= i < 2 * ranks - 1: the first `rank` squares belong to the earlier
    # chunk (at = 0, keys of chunk i), the others to the later one (at = 1, keys of
    # chunk i - rank).
    number = jnp.arange(2 * ranks - 1, dtype=jnp.int32)
    at = jnp.where(number < rank, 0, 1)
    seen = jnp.where(number < rank, number, number - rank)
    # Gathered keys are ordered by rank, two chunks each: chunk c < ranks is the first
    # of rank c, any other the second of rank 2 * ranks - 1 - c.
    place = jnp.where(seen < ranks, 2 * seen, 2 * (2 * ranks - 1 - seen) + 1)
    chunk = blocks * config.block // 2
    before = pairs_of_chunks((at, chunks[at]), (place, seen), chunk, config.block)
    return (own._replace(key=own.key + rank * blocks), True), (before, False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    config: BlockConfig,
    ranks: int,
    queries: QueryBlocks,
    keys: KeyValueBlocks,
    sinks: SinkBlocks,
    rank: Array,
) -> Array:
    return _forward(config, ranks, queries, keys, sinks, rank)[0]


def _forward(
    config: BlockConfig,
    ranks: int,
    queries: QueryBlocks,
    keys: KeyValueBlocks,
    sinks: SinkBlocks,
    rank,
):
    state = init_softmax(queries.query, keys.value)
    for pairs, causal in _pairs(config, ranks, queries, rank):
        state = attend(config, queries, keys, state, pairs, causal=causal)
    out, log_sum = name_residuals(*finalize_softmax(state, sinks), keys.value.dtype)
    return out, (queries, keys, sinks, rank, out, log_sum)


def _backward(config: BlockConfig, ranks: int, saved, grad: Array):
    queries, keys, sinks, rank, out, log_sum = saved
    inputs = backward_inputs(grad, out, log_sum)
    grads = zero_grads(queries, keys)
    for pairs, causal in _pairs(config, ranks, queries, rank):
        grads = attend_backward(
            config, queries, keys, inputs, grads, pairs, causal=causal
        )
    query, key, value = (
        x.astype(y.dtype)
        for x, y in zip(grads, (queries.query, keys.key, keys.value), strict=True)
    )
    of_queries, of_keys = (
        QueryBlocks(query, None, None),
        KeyValueBlocks(key, value, None),
    )
    return of_queries, of_keys, block_sinks_grad(sinks, inputs), None


_attend.defvjp(_forward, _backward)
