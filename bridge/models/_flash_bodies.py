"""Bodies of the flash attention kernels, for one block of queries or of keys."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float

from bridge.models._kernel_mask import Ranges, Scores, Tokens

LOWEST = -1e30
"""Maximum of no scores: finite, so that differences with it are numbers."""

_LOG2_E = math.log2(math.e)


class Operands(NamedTuple):
    """What all kernels read: arrays of a call, their block specs, or refs in a body.

    In a body, blocks of queries are on one side and all keys on the other, or the
    reverse where gradients of keys are computed. Heads may be wider than their dim.

    Attributes:
      query: Queries, `[queries, head_dim]`; of all heads of a group where gradients of
        keys are computed, `[queries, group, head_dim]`.
      key: Keys, `[keys, head_dim]`.
      value: Values, `[keys, v_head_dim]`.
      queries: Positions and segments of the queries.
      keys: Positions and segments of the keys.
      window: Tokens that a query sees, `[1]`; None for all before it.
      ranges: Blocks of the other side that each block visits.
    """

    query: Any
    key: Any
    value: Any
    queries: Tokens
    keys: Tokens
    window: Any
    ranges: Ranges


class Stats(NamedTuple):
    """What the backward pass knows of each query.

    Attributes:
      log_sum: Log-sum-exp of the scores over all keys, `[queries]`, or
        `[group, queries]` where gradients of keys are computed.
      delta: Inner product of output and cotangent, likewise.
    """

    log_sum: Any
    delta: Any


class Softmax(NamedTuple):
    """State of an online softmax over base 2.

    Attributes:
      out: Weighted sums of values, relative to `top`.
      top: Largest score so far.
      total: Sum of the weights, relative to `top`.
    """

    out: Float[Array, "queries v_head_dim"]
    top: Float[Array, " queries"]
    total: Float[Array, " queries"]


def forward_body(
    scores: Scores,
    widths: tuple[int, int],
    key_block: int,
    operands: Operands,
    out: Any,
    log_sum: Any,
) -> None:
    """Writes the output and the log-sum-exp of a block of queries.

    Args:
      scores: Static parameters of the scores.
      widths: Head dim of queries and keys, and of values; refs may be wider.
      key_block: Keys per block.
      operands: Refs of a block of queries and of all keys.
      out: Ref of the output, `[queries, v_head_dim]`.
      log_sum: Ref of the log-sum-exp, `[queries]`.
    """
    query, key, value, queries, keys, window, ranges = operands
    own, width = _load(query, widths[0]), out.shape[-1]
    rows = _rows(queries)

    def visit(block, state: Softmax) -> Softmax:
        at = pl.dslice(block * key_block, key_block)
        products = _products(scores, own, _load(key.at[at, :], widths[0]))[0]
        seen = _seen(rows, _rows(keys, at), window)
        top = jnp.maximum(state.top, jnp.where(seen, products, LOWEST).max(-1))
        # Masked again: a row that sees no key of the block has its top at LOWEST.
        weights = jnp.where(seen, jnp.exp2(products - top[:, None]), 0.0)
        # The sums so far are relative to the old maximum.
        correction = jnp.exp2(state.top - top)
        values = _load(value.at[at, :], widths[1])
        added = plgpu.dot(weights.astype(values.dtype), values)
        return Softmax(
            state.out * correction[:, None] + added,
            top,
            state.total * correction + weights.sum(-1),
        )

    begin = Softmax(
        jnp.zeros((own.shape[0], width), jnp.float32),
        jnp.full(own.shape[0], LOWEST, jnp.float32),
        jnp.zeros(own.shape[0], jnp.float32),
    )
    state = lax.fori_loop(*_span(ranges), visit, begin)
    # Rows that see nothing, which pad a row, have an output of zero.
    total = jnp.where(state.total > 0, state.total, 1.0)
    _store(out, state.out / total[:, None], widths[1])
    log_sum[...] = (state.top + jnp.log2(total)) / _LOG2_E


def query_grad_body(
    scores: Scores,
    widths: tuple[int, int],
    key_block: int,
    grad: Any,
    stats: Stats,
    operands: Operands,
    query_grad: Any,
) -> None:
    """Writes the gradient of a block of queries.

    Args:
      scores: Static parameters of the scores.
      widths: Head dim of queries and keys, and of values.
      key_block: Keys per block.
      grad: Ref of the cotangent of the output, `[queries, v_head_dim]`.
      stats: Refs of the stats of the block of queries.
      operands: Refs of a block of queries and of all keys.
      query_grad: Ref of the result, `[queries, head_dim]`.
    """
    query, key, value, queries, keys, window, ranges = operands
    own, own_grad = _load(query, widths[0]), _load(grad, widths[1])
    here, rows = Stats(stats.log_sum[...], stats.delta[...]), _rows(queries)

    def visit(block, total):
        at = pl.dslice(block * key_block, key_block)
        keys_here = _load(key.at[at, :], widths[0])
        values = _load(value.at[at, :], widths[1])
        seen = _seen(rows, _rows(keys, at), window)
        _, d_products = _weights(scores, own, keys_here, values, own_grad, here, seen)
        return total + plgpu.dot(d_products.astype(keys_here.dtype), keys_here)

    zeros = jnp.zeros(own.shape, jnp.float32)
    total = lax.fori_loop(*_span(ranges), visit, zeros)
    _store(query_grad, total * scores.scale, widths[0])


def key_grads_body(
    scores: Scores,
    widths: tuple[int, int],
    query_block: int,
    group: int,
    grad: Any,
    stats: Stats,
    operands: Operands,
    key_grad: Any,
    value_grad: Any,
) -> None:
    """Writes the gradients of a block of keys and values, over the heads of a group.

    Args:
      scores: Static parameters of the scores.
      widths: Head dim of queries and keys, and of values.
      query_block: Queries per block.
      group: Query heads that read a key head.
      grad: Ref of the cotangent of the output, `[queries, group, v_head_dim]`.
      stats: Refs of the stats of all queries of the group.
      operands: Refs of a block of keys and of all queries of the group.
      key_grad: Ref of the gradient of the keys, `[keys, head_dim]`.
      value_grad: Ref of the gradient of the values, `[keys, v_head_dim]`.
    """
    query, key, value, queries, keys, window, ranges = operands
    keys_here, values = _load(key, widths[0]), _load(value, widths[1])
    columns, (first, stop) = _rows(keys), _span(ranges)

    def visit(number, totals):
        # Blocks of the first head, then those of the next.
        head = lax.div(number, jnp.maximum(stop - first, 1))
        block = first + lax.rem(number, jnp.maximum(stop - first, 1))
        at = pl.dslice(block * query_block, query_block)
        own = _load(query.at[at, head, :], widths[0])
        own_grad = _load(grad.at[at, head, :], widths[1])
        here = Stats(stats.log_sum[head, at], stats.delta[head, at])
        seen = _seen(_rows(queries, at), columns, window)
        weights, d_products = _weights(
            scores, own, keys_here, values, own_grad, here, seen
        )
        return (
            totals[0] + plgpu.dot(d_products.astype(own.dtype).T, own),
            totals[1] + plgpu.dot(weights.astype(own_grad.dtype).T, own_grad),
        )

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (keys_here, values))
    totals = lax.fori_loop(0, group * (stop - first), visit, zeros)
    _store(key_grad, totals[0] * scores.scale, widths[0])
    _store(value_grad, totals[1], widths[1])


def _products(scores: Scores, query: Array, key: Array) -> tuple[Array, Array | float]:
    """Returns the scores times log2(e), and their derivative by the products."""
    products = plgpu.dot(query, key.T) * scores.scale
    if scores.softcap is None:
        return products * _LOG2_E, 1.0
    capped = jnp.tanh(products / scores.softcap)
    # d score / d product = 1 - tanh**2
    return capped * (scores.softcap * _LOG2_E), 1.0 - capped * capped


def _weights(
    scores: Scores,
    query: Array,
    key: Array,
    value: Array,
    grad: Array,
    stats: Stats,
    seen: Bool[Array, "queries keys"],
) -> tuple[Float[Array, "queries keys"], Float[Array, "queries keys"]]:
    """Returns the weights of the values, and the gradient of the scaled products."""
    log_sum, delta = stats
    products, d_score = _products(scores, query, key)
    weights = jnp.exp2(products - log_sum[:, None] * _LOG2_E)
    weights = jnp.where(seen, weights, 0.0)
    by_value = plgpu.dot(grad, value.T)
    return weights, weights * (by_value - delta[:, None]) * d_score


def _seen(rows: Tokens, columns: Tokens, window: Any) -> Bool[Array, "queries keys"]:
    behind = rows.positions[:, None] - columns.positions[None, :]
    seen = behind >= 0
    if window is not None:
        seen &= behind < window[0]
    if rows.segments is not None and columns.segments is not None:
        seen &= rows.segments[:, None] == columns.segments[None, :]
    return seen


def _rows(tokens: Tokens, at: Any = slice(None)) -> Tokens:
    segments = None if tokens.segments is None else tokens.segments[at]
    return Tokens(tokens.positions[at], segments)


def _span(ranges: Ranges) -> tuple[Array, Array]:
    block = pl.program_id(0)
    return ranges.first[block], ranges.stop[block]


def _load(ref: Any, width: int) -> Array:
    if ref.shape[-1] == width:
        return ref[...]
    columns = jnp.arange(ref.shape[-1], dtype=jnp.int32)[None, :]
    return plgpu.load(ref, mask=columns < width, other=0.0)


def _store(ref: Any, values: Array, width: int) -> None:
    values = values.astype(ref.dtype)
    if ref.shape[-1] == width:
        ref[...] = values
        return
    columns = jnp.arange(ref.shape[-1], dtype=jnp.int32)[None, :]
    plgpu.store(ref, values, mask=columns < width)
