"""Context-parallel ring attention: keys and values rotate over the ranks of `cp`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fsdp_jax._scopes import RING_ATTENTION
from fsdp_jax.ops.attention._blockwise import (
    BlockConfig,
    Grads,
    KeyValueBlocks,
    Pairs,
    QueryBlocks,
    SinkBlocks,
    Softmax,
    attend,
    attend_backward,
    backward_inputs,
    block_sinks_grad,
    finalize_softmax,
    heads_of_blocks,
    init_softmax,
    join_pairs,
    pairs_of_chunks,
    zero_grads,
)
from fsdp_jax.ops.attention._common import (
    as_window,
    block_config,
    name_residuals,
    to_blocks,
    triangles,
)
from fsdp_jax.ops.attention._kernel_ring import (
    AttentionKernel,
    Given,
    KernelRing,
    KeyValues,
    Scores,
    kernel_ring,
)
from fsdp_jax.ops.attention._rotation import Ring
from fsdp_jax.ops.attention._zigzag import check_chunks, chunks_of, ranks_along

Chunks = tuple[Array, Array]


def ring_attention(
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
    kernel: AttentionKernel | None = None,
) -> Float[Array, "batch seq heads v_head_dim"]:
    """Computes causal attention over rows whose tokens are split over `axis`.

    Each rank keeps its queries. Keys and values rotate from neighbour to neighbour
    while each rank computes with those received before. Memory per rank: two of the
    `cp` parts of the keys and values, the one in use and the one in flight. The
    backward pass rotates once more, and the gradient of each part is sent along with
    it. Rows are in the order of `zigzag`: each step is
    then half of a square on each rank, and no block is computed only to be masked.

    Pass it as `attention` to `bridge.models.Decoder`, with `zigzag_positions` as
    `positions`; with `tp`, inside `split_heads`. Where `axis` is not manual, rows are
    unsharded and in order.

    Scores are computed a block at a time, and again in the backward pass. The residuals
    are named `context_attention`: with a `remat_policy` of
    `jax.checkpoint_policies.save_only_these_names("context_attention")` a
    rematerialized layer does not compute attention again.

    Args:
      query: Queries of this rank, rotary embedding applied; head `i` reads key head
        `i // (heads / kv_heads)`.
      key: Keys of this rank, rotary embedding applied.
      value: Values of this rank.
      scale: Factor of the scores.
      segment_ids: Segment ids of documents packed in one row, which attend only to
        themselves; None for one document per row.
      window: Number of tokens that a query sees, its own included, also those of other
        ranks; None for all before it.
      softcap: Bound of the scores: tanh maps them into (-softcap, softcap). None for
        none.
      sinks: Scores per head that take part in the softmax without a value.
      axis: Mesh axis.
      kernel: Fused kernel for the parts of rows that meet, e.g.
        `bridge.models.FlashKernel()`; None for blocks by XLA's operations.

    Returns:
      The attention output of each query.

    Raises:
      ValueError: If a rank's part of a row does not divide into two chunks, or on a
        mesh with pipeline stages.

    Source: Liu et al., Ring Attention, arXiv:2310.01889; Dao, FlashAttention-2,
      arXiv:2307.08691, for backward.
    """
    _check_stages(axis)
    if kernel is not None:
        if (ranks := ranks_along(axis)) > 1:
            check_chunks({"attention": query.shape[1] * ranks}, ranks)
        ring = KernelRing(axis, ranks, kernel, Scores(scale, softcap))
        window = as_window(window)
        with jax.named_scope(RING_ATTENTION):
            keys = KeyValues(key, value, segment_ids)
            return kernel_ring(ring, Given(query, keys, sinks, window))
    config = block_config(query.shape[1], scale, softcap, axis)
    ring = _BlockRing(axis, ranks_along(axis), config)
    with jax.named_scope(RING_ATTENTION):
        given = to_blocks(ring.config, query, key, value, segment_ids, window, sinks)
        out: Any = _ring(ring, *given)
        return heads_of_blocks(out, ring.config.block)


def _check_stages(axis: str) -> None:
    """Raises for a ring within a pipeline stage, which would deadlock.

    The collective-permute of keys must run on all devices, but only one stage's devices
    run a layer at a time (on CPUs XLA aborts after 40 s).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if ranks_along(axis) > 1 and (stages := mesh.shape.get("pp", 1)) > 1:
        raise ValueError(
            f"ring_attention over {axis}={mesh.shape[axis]} in one of pp={stages} "
            "stages: the collective-permute of keys must run on all devices, but only "
            "one stage's devices run a layer at a time. Use pp=1, or "
            "fsdp_jax.ops.all_gather_attention or ulysses_attention (--cp-form)."
        )


@dataclasses.dataclass(frozen=True)
class _BlockRing(Ring):
    """A ring whose ranks attend by blocks.

    Attributes:
      config: Static parameters of block attention.
    """

    config: BlockConfig

    def pairs(self, keys: KeyValueBlocks, step: Int[Array, ""] | None) -> Pairs:
        """Returns the pairs of blocks that meet after keys were sent `step` times."""
        return self._own_pairs(keys) if step is None else self._pairs(keys, step)

    def _own_pairs(self, keys: KeyValueBlocks) -> Pairs:
        """Returns two causal triangles, and the square between the two chunks.

        The later chunk of queries sees all of the earlier chunk of keys:

                     keys 0     keys 1
            query 0  triangle   -
            query 1  square     triangle
        """
        own = triangles(self.config, self.rank(), self.ranks, self._length(keys))
        if self.ranks == 1:
            return own
        one, zero = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)
        chunks = chunks_of(self.rank(), self.ranks)
        square = self._of_chunks(keys, (one, chunks[1:]), (zero, chunks[:1]))
        return join_pairs(own, square)

    def _pairs(self, keys: KeyValueBlocks, step: Int[Array, ""]) -> Pairs:
        """Returns the two squares that this rank sees of the rank `step` before it.

        Rank r has chunks r and 2 * ranks - 1 - r of the row, so by their indices every
        pair of chunks of two ranks is seen entirely or not at all:

            source < rank    query 0 and query 1 see keys 0
            source > rank    query 1 sees keys 0 and keys 1
        """
        rank = self.rank()
        source = (rank - step) % self.ranks
        own, other = (chunks_of(number, self.ranks) for number in (rank, source))
        is_before = source < rank
        query = jnp.stack([jnp.int32(1), jnp.where(is_before, 0, 1)])
        key = jnp.stack([jnp.int32(0), jnp.where(is_before, 0, 1)])
        return self._of_chunks(keys, (query, own[query]), (key, other[key]))

    def _of_chunks(self, keys: KeyValueBlocks, query: Chunks, key: Chunks) -> Pairs:
        return pairs_of_chunks(query, key, self._length(keys) // 2, self.config.block)

    def _length(self, keys: KeyValueBlocks) -> int:
        return keys.key.shape[0] * self.config.block


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    ring: _BlockRing, queries: QueryBlocks, keys: KeyValueBlocks, sinks: SinkBlocks
) -> Array:
    return _forward(ring, queries, keys, sinks)[0]


def _forward(
    ring: _BlockRing, queries: QueryBlocks, keys: KeyValueBlocks, sinks: SinkBlocks
):
    def visit(
        state: Softmax, keys: KeyValueBlocks, step: Int[Array, ""] | None
    ) -> Softmax:
        pairs, causal = ring.pairs(keys, step), step is None
        return attend(ring.config, queries, keys, state, pairs, causal=causal)

    state = ring.rotate(visit, init_softmax(queries.query, keys.value), keys)
    out, log_sum = name_residuals(*finalize_softmax(state, sinks), keys.value.dtype)
    return out, (queries, keys, sinks, out, log_sum)


def _backward(ring: _BlockRing, saved, grad: Array):
    queries, keys, sinks, out, log_sum = saved
    inputs = backward_inputs(grad, out, log_sum)

    def visit(grads: Grads, keys: KeyValueBlocks, step: Int[Array, ""] | None) -> Grads:
        pairs, causal = ring.pairs(keys, step), step is None
        fresh = zero_grads(queries, keys)._replace(query=grads.query)
        fresh = attend_backward(
            ring.config, queries, keys, inputs, fresh, pairs, causal=causal
        )
        if causal:  # The keys of this rank: no other rank has added a gradient yet.
            return fresh
        # The gradient of a part is one step behind the part: its sum so far arrives
        # from the rank that had these keys before, while this rank computes its term.
        key, value = ring.send((grads.key, grads.value))
        return Grads(fresh.query, key + fresh.key, value + fresh.value)

    grads = ring.rotate(visit, zero_grads(queries, keys), keys)
    query, key, value = (
        x.astype(y.dtype)
        for x, y in zip(grads, (queries.query, keys.key, keys.value), strict=True)
    )
    if ring.ranks > 1:
        # The last keys were those of the next rank: return their gradients to it.
        key, value = ring.send((key, value))
    of_queries, of_keys = (
        QueryBlocks(query, None, None),
        KeyValueBlocks(key, value, None),
    )
    return of_queries, of_keys, block_sinks_grad(sinks, inputs)


_ring.defvjp(_forward, _backward)
