"""Blockwise attention: one block of queries and one of keys at a time, with backward.

Lists of pairs select the blocks that meet, so that the same loop runs a causal
triangle, a step of a ring, and the remainder of a gathered row. Only the scores of one
pair are stored at a time: the softmax is kept as a running maximum and sum, in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fsdp_jax.ops.attention._sinks import sinks_grad

BLOCK = 1024
"""Maximum number of tokens per block: 128 MiB of float32 scores for 32 heads."""

# `rows` = heads per group * block: the queries of a block for each head of a group.
Queries = Float[Array, "blocks batch kv_heads rows dim"]
Stats = Float[Array, "blocks batch kv_heads rows"]
KeyBlocks = Float[Array, "blocks batch kv_heads block dim"]
SinkBlocks = Float[Array, "kv_heads rows"] | None


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Static parameters of blockwise attention, the same for all pairs.

    Attributes:
      scale: Factor of the scores.
      softcap: Bound of the scores, by tanh; None for none.
      block: Number of tokens per block.
    """

    scale: float
    softcap: float | None
    block: int


class KeyValueBlocks(NamedTuple):
    """Keys, values and their segment ids, in blocks.

    Attributes:
      key: Keys, `[blocks, batch, kv_heads, block, head_dim]`.
      value: Values, `[blocks, batch, kv_heads, block, v_head_dim]`.
      segments: Segment ids, `int[blocks, batch, block]`; None for one document per row.
    """

    key: KeyBlocks
    value: KeyBlocks
    segments: Int[Array, "blocks batch block"] | None


class QueryBlocks(NamedTuple):
    """Queries in blocks, and the limits of what each of them sees.

    Attributes:
      query: Queries, `[blocks, batch, kv_heads, rows, head_dim]`.
      segments: Segment ids of the queries; None for one document per row.
      window: Number of tokens that a query sees, its own included; None for all before
        it.
    """

    query: Queries
    segments: Int[Array, "blocks batch block"] | None
    window: Int[Array, ""] | None


class Softmax(NamedTuple):
    """State of an online softmax.

    Attributes:
      out: Weighted sums of values, relative to `top`.
      top: Largest score so far.
      total: Sum of the weights, relative to `top`.
    """

    out: Queries
    top: Stats
    total: Stats


class Pairs(NamedTuple):
    """Pairs of a block of queries and a block of keys.

    Attributes:
      query: Index of each block of queries.
      key: Index of each block of keys.
      offset: Position of the first query minus position of the first key, in tokens.
    """

    query: Int[Array, " pairs"]
    key: Int[Array, " pairs"]
    offset: Int[Array, " pairs"]


class Grads(NamedTuple):
    """Gradients of queries, keys and values, in blocks, float32."""

    query: Queries
    key: KeyBlocks
    value: KeyBlocks


def block_of(chunk: int) -> int:
    """Returns the block size for a chunk: its largest divisor up to `BLOCK`."""
    return max(size for size in range(1, min(chunk, BLOCK) + 1) if chunk % size == 0)


def blocks_of_heads(
    heads: Float[Array, "batch seq heads dim"], block: int, groups: int
) -> Float[Array, "blocks batch kv_heads rows dim"]:
    """Reshapes heads into blocks; the heads of a group are consecutive in `rows`."""
    batch, seq, number, dim = heads.shape
    cut = heads.reshape(batch, seq // block, block, groups, number // groups, dim)
    return cut.transpose(1, 0, 3, 4, 2, 5).reshape(
        seq // block, batch, groups, number // groups * block, dim
    )


def heads_of_blocks(
    blocks: Float[Array, "blocks batch kv_heads rows dim"], block: int
) -> Float[Array, "batch seq heads dim"]:
    """Inverts `blocks_of_heads`."""
    count, batch, groups, rows, dim = blocks.shape
    cut = blocks.reshape(count, batch, groups, rows // block, block, dim)
    return cut.transpose(1, 0, 4, 2, 3, 5).reshape(
        batch, count * block, groups * (rows // block), dim
    )


def blocks_of_ids(
    ids: Int[Array, "batch seq"] | None, block: int
) -> Int[Array, "blocks batch block"] | None:
    """Reshapes segment ids into blocks."""
    if ids is None:
        return None
    batch, seq = ids.shape
    return jnp.moveaxis(ids.reshape(batch, seq // block, block), 1, 0)


def pairs_of_chunks(
    queries: tuple[Any, Any],
    keys: tuple[Any, Any],
    chunk: int,
    block: int,
    *,
    triangle: bool = False,
) -> Pairs:
    """Returns the pairs of blocks within pairs of chunks.

    Args:
      queries: Local indices of the chunks of queries, and their indices in the row.
      keys: Local indices and row indices of the chunks of keys that they meet.
      chunk: Number of tokens per chunk.
      block: Number of tokens per block.
      triangle: Whether both are the same chunk: keys after a query are left out.
    """
    count = chunk // block
    own, other = (x.ravel() for x in np.indices((count, count)))
    if triangle:
        own, other = np.tril_indices(count)
    (at, number), (key_at, key_number) = (
        (jnp.asarray(x, jnp.int32) for x in pair) for pair in (queries, keys)
    )
    offset = ((number - key_number) * chunk)[:, None] + (own - other)[None] * block
    return Pairs(
        ((at * count)[:, None] + own[None]).ravel().astype(jnp.int32),
        ((key_at * count)[:, None] + other[None]).ravel().astype(jnp.int32),
        offset.ravel().astype(jnp.int32),
    )


def join_pairs(*some: Pairs) -> Pairs:
    """Concatenates lists of pairs."""
    return Pairs(*(jnp.concatenate(parts) for parts in zip(*some, strict=True)))


def init_softmax(query: Queries, value: KeyBlocks) -> Softmax:
    """Returns the state of a softmax over no keys."""
    wide = _wide(query)
    stats = query.shape[:-1]
    return Softmax(
        jnp.zeros((*stats, value.shape[-1]), wide),
        # Not -inf: `top - new_top` would be NaN while no key has been seen.
        jnp.full(stats, jnp.finfo(wide).min, wide),
        jnp.zeros(stats, wide),
    )


def attend(
    config: BlockConfig,
    queries: QueryBlocks,
    keys: KeyValueBlocks,
    state: Softmax,
    pairs: Pairs,
    *,
    causal: bool,
) -> Softmax:
    """Adds the scores and values of pairs to a softmax.

    Args:
      config: Static parameters.
      queries: Queries.
      keys: Keys and values.
      state: Softmax so far.
      pairs: Pairs of blocks; with a window, pairs out of its reach are skipped.
      causal: Whether keys of a pair may come after its queries and must be masked.
    """

    def visit(state: Softmax, pair: Pairs) -> Softmax:
        out, top, total = jax.tree.map(lambda x: x[pair.query], state)
        scores, seen = _scores(config, queries, keys, pair, causal)
        new_top = jnp.maximum(top, _where(seen, scores, top[..., None]).max(-1))
        weights = _where(seen, jnp.exp(scores - new_top[..., None]), 0)
        # The sums so far are relative to the old maximum.
        correction = jnp.exp(top - new_top)
        value = keys.value[pair.key]
        added = jnp.einsum(
            "bgqk,bgkd->bgqd",
            weights.astype(value.dtype),
            value,
            preferred_element_type=out.dtype,
        )
        new = Softmax(
            out * correction[..., None] + added,
            new_top,
            total * correction + weights.sum(-1),
        )
        return jax.tree.map(lambda all, x: all.at[pair.query].set(x), state, new)

    return _over(queries.window, config.block, visit, state, pairs)


def finalize_softmax(state: Softmax, sinks: SinkBlocks) -> tuple[Queries, Stats]:
    """Returns the attention output, and the log-sum-exp of scores and sinks."""
    log_sum = state.top + jnp.log(state.total)
    if sinks is None:
        return state.out / state.total[..., None], log_sum
    with_sinks = jnp.logaddexp(log_sum, sinks.astype(log_sum.dtype)[None, None])
    return (
        state.out * jnp.exp(state.top - with_sinks)[..., None],
        with_sinks,
    )


class BackwardInputs(NamedTuple):
    """Per-query inputs of the backward pass.

    Attributes:
      grad: Cotangent of the attention output.
      log_sum: Log of the sum of exponentials, from `finalize_softmax`.
      delta: Inner product of cotangent and output.
    """

    grad: Queries
    log_sum: Stats
    delta: Stats


def backward_inputs(grad: Queries, out: Queries, log_sum: Stats) -> BackwardInputs:
    """Computes the per-query inputs of the backward pass."""
    delta = jnp.sum(grad.astype(log_sum.dtype) * out.astype(log_sum.dtype), -1)
    return BackwardInputs(grad, log_sum, delta)


def zero_grads(queries: QueryBlocks, keys: KeyValueBlocks) -> Grads:
    """Returns gradients of zeros, float32 at least."""
    wide = _wide(queries.query)
    zeros = (jnp.zeros(x.shape, wide) for x in (queries.query, keys.key, keys.value))
    return Grads(*zeros)


def attend_backward(
    config: BlockConfig,
    queries: QueryBlocks,
    keys: KeyValueBlocks,
    inputs: BackwardInputs,
    grads: Grads,
    pairs: Pairs,
    *,
    causal: bool,
) -> Grads:
    """Adds the gradients of pairs to `grads`."""

    def visit(grads: Grads, pair: Pairs) -> Grads:
        wide = functools.partial(jnp.einsum, preferred_element_type=grads.query.dtype)
        query, key, value = queries.query[pair.query], *(x[pair.key] for x in keys[:2])
        grad, log_sum, delta = jax.tree.map(lambda x: x[pair.query], inputs)
        scores, seen = _scores(config, queries, keys, pair, causal)
        # Softmax weights, recomputed from the saved log-sum.
        weights = _where(seen, jnp.exp(scores - log_sum[..., None]), 0)
        of_weights = wide("bgqd,bgkd->bgqk", grad, value)
        of_scores = weights * (of_weights - delta[..., None]) * config.scale
        if config.softcap is not None:
            # `scores` are capped already: the derivative of softcap * tanh(s /
            # softcap).
            of_scores *= 1 - (scores / config.softcap) ** 2
        of_scores = of_scores.astype(query.dtype)
        weights = weights.astype(grad.dtype)
        return Grads(
            grads.query.at[pair.query].add(wide("bgqk,bgkd->bgqd", of_scores, key)),
            grads.key.at[pair.key].add(wide("bgqk,bgqd->bgkd", of_scores, query)),
            grads.value.at[pair.key].add(wide("bgqk,bgqd->bgkd", weights, grad)),
        )

    return _over(queries.window, config.block, visit, grads, pairs)


def block_sinks_grad(sinks: SinkBlocks, inputs: BackwardInputs) -> SinkBlocks:
    """Returns the gradient of the sinks."""
    if sinks is None:
        return None
    return sinks_grad(sinks, inputs.log_sum, inputs.delta, (0, 1))


def _over(window, block: int, visit, state, pairs: Pairs):
    def body(state, pair: Pairs):
        if window is None:
            return visit(state, pair), None
        # Skip the pair if even its first query and last key are farther apart than the
        # window.
        is_hidden = pair.offset - (block - 1) >= window
        return lax.cond(is_hidden, lambda s, _: s, visit, state, pair), None

    return lax.scan(body, state, pairs)[0]


def _scores(
    config: BlockConfig,
    queries: QueryBlocks,
    keys: KeyValueBlocks,
    pair: Pairs,
    causal: bool,
) -> tuple[Float[Array, ...], Bool[Array, ...] | None]:
    """Returns the scores of a pair, and a mask of those that count; None for all."""
    query, key = queries.query[pair.query], keys.key[pair.key]
    products = jnp.einsum(
        "bgqd,bgkd->bgqk", query, key, preferred_element_type=_wide(query)
    )
    scores = products * config.scale
    if config.softcap is not None:
        scores = config.softcap * jnp.tanh(scores / config.softcap)
    seen = _seen(config.block, queries, keys, pair, causal)
    return scores, None if seen is None else jnp.broadcast_to(seen, scores.shape)


def _seen(
    block: int, queries: QueryBlocks, keys: KeyValueBlocks, pair: Pairs, causal: bool
):
    masks = []
    group = queries.query.shape[-2] // block
    own, other = (jnp.arange(n, dtype=jnp.int32) for n in (group * block, block))
    offset = (pair.offset + own[:, None] % block - other[None, :])[None]
    if causal:
        masks.append(offset >= 0)
    if queries.window is not None:
        masks.append(offset < queries.window)
    if queries.segments is not None and keys.segments is not None:
        query_segments = jnp.tile(queries.segments[pair.query], (1, group))
        masks.append(query_segments[:, :, None] == keys.segments[pair.key][:, None, :])
    if not masks:
        return None
    seen = functools.reduce(jnp.logical_and, jnp.broadcast_arrays(*masks))
    return seen[:, None]


def _where(seen, values, otherwise):
    if seen is None:
        return values
    return jnp.where(seen, values, jnp.broadcast_to(otherwise, values.shape))


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
