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
    Asked,
    Form,
    Grads,
    Keys,
    Pairs,
    Softmax,
    attend,
    attend_backward,
    begin,
    finish,
    heads_of_blocks,
    join_pairs,
    known_of,
    no_grads,
    pairs_of_chunks,
    sinks_backward,
)
from fsdp_jax.ops.attention._common import cut, form_of, named, triangles
from fsdp_jax.ops.attention._kernel_ring import (
    AttentionKernel,
    Given,
    KernelRing,
    Scores,
    kernel_ring,
)
from fsdp_jax.ops.attention._kernel_ring import Keys as KernelKeys
from fsdp_jax.ops.attention._rotation import Ring
from fsdp_jax.ops.attention._zigzag import check_chunks, chunks_of, ranks_along

Chunks = tuple[Array, Array]
Sinks = Float[Array, "kv_heads rows"] | None


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
    while each rank computes with those received before: a rank stores two parts of a
    row, however long the row is. The backward pass rotates once more, and the gradient
    of each part is sent along with it. Rows are in the order of `zigzag`: each step is
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
        window = None if window is None else jnp.asarray(window, jnp.int32)
        with jax.named_scope(RING_ATTENTION):
            keys = KernelKeys(key, value, segment_ids)
            return kernel_ring(ring, Given(query, keys, sinks, window))
    form = form_of(query.shape[1], scale, softcap, axis)
    ring = _BlockRing(axis, ranks_along(axis), form)
    with jax.named_scope(RING_ATTENTION):
        given = cut(ring.form, query, key, value, segment_ids, window, sinks)
        mixed: Any = _ring(ring, *given)
        return heads_of_blocks(mixed, ring.form.block)


def _check_stages(axis: str) -> None:
    """Raises for a ring within a pipeline stage, which would deadlock.

    XLA runs a collective-permute on all devices of a mesh together, but a layer only on
    those of the active stage (on CPUs it aborts after 40 s).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if ranks_along(axis) > 1 and (stages := mesh.shape.get("pp", 1)) > 1:
        raise ValueError(
            f"ring_attention over {axis}={mesh.shape[axis]} in one of pp={stages} "
            "stages: keys that go round are sent by all devices at once, and only "
            "those of one stage run a layer. Use fsdp_jax.ops.all_gather_attention or "
            "ulysses_attention (--cp-form), or pp=1."
        )


@dataclasses.dataclass(frozen=True)
class _BlockRing(Ring):
    """A ring whose ranks attend by blocks.

    Attributes:
      form: Static parameters of block attention.
    """

    form: Form

    def pairs(self, keys: Keys, step: Int[Array, ""] | None) -> Pairs:
        """Returns the pairs of blocks that meet when keys have come `step` ranks."""
        return self._own_pairs(keys) if step is None else self._pairs(keys, step)

    def _own_pairs(self, keys: Keys) -> Pairs:
        """Returns two causal triangles, and the square between the two chunks."""
        own = triangles(self.form, self.rank(), self.ranks, self._length(keys))
        if self.ranks == 1:
            return own
        one, zero = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)
        chunks = chunks_of(self.rank(), self.ranks)
        square = self._of_chunks(keys, (one, chunks[1:]), (zero, chunks[:1]))
        return join_pairs(own, square)

    def _pairs(self, keys: Keys, step: Int[Array, ""]) -> Pairs:
        """Returns the two squares that this rank sees of the rank `step` before it.

        If that rank has a smaller index, both chunks here see its earlier chunk; if it
        has a larger one, the later chunk here sees both of its chunks.
        """
        rank = self.rank()
        source = (rank - step) % self.ranks
        own, other = (chunks_of(number, self.ranks) for number in (rank, source))
        is_before = source < rank
        query = jnp.stack([jnp.int32(1), jnp.where(is_before, 0, 1)])
        key = jnp.stack([jnp.int32(0), jnp.where(is_before, 0, 1)])
        return self._of_chunks(keys, (query, own[query]), (key, other[key]))

    def _of_chunks(self, keys: Keys, query: Chunks, key: Chunks) -> Pairs:
        return pairs_of_chunks(query, key, self._length(keys) // 2, self.form.block)

    def _length(self, keys: Keys) -> int:
        return keys.key.shape[0] * self.form.block


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: _BlockRing, asked: Asked, keys: Keys, sinks: Sinks) -> Array:
    return _forward(ring, asked, keys, sinks)[0]


def _forward(ring: _BlockRing, asked: Asked, keys: Keys, sinks: Sinks):
    def visit(state: Softmax, keys: Keys, step: Int[Array, ""] | None) -> Softmax:
        pairs, causal = ring.pairs(keys, step), step is None
        return attend(ring.form, asked, keys, state, pairs, causal=causal)

    state = ring.go_round(visit, begin(asked.query, keys.value), keys)
    out, log_sum = named(*finish(state, sinks), keys.value.dtype)
    return out, (asked, keys, sinks, out, log_sum)


def _backward(ring: _BlockRing, saved, grad: Array):
    asked, keys, sinks, out, log_sum = saved
    known = known_of(grad, out, log_sum)

    def visit(grads: Grads, keys: Keys, step: Int[Array, ""] | None) -> Grads:
        pairs, causal = ring.pairs(keys, step), step is None
        fresh = no_grads(asked, keys)._replace(query=grads.query)
        fresh = attend_backward(
            ring.form, asked, keys, known, fresh, pairs, causal=causal
        )
        if causal:  # The keys of this rank: no other rank has added a gradient yet.
            return fresh
        # The sums so far are received while this rank computes its own term.
        key, value = ring.send((grads.key, grads.value))
        return Grads(fresh.query, key + fresh.key, value + fresh.value)

    grads = ring.go_round(visit, no_grads(asked, keys), keys)
    query, key, value = (
        x.astype(y.dtype)
        for x, y in zip(grads, (asked.query, keys.key, keys.value), strict=True)
    )
    if ring.ranks > 1:
        # The last keys were those of the next rank: return their gradients to it.
        key, value = ring.send((key, value))
    of_asked, of_keys = Asked(query, None, None), Keys(key, value, None)
    return of_asked, of_keys, sinks_backward(sinks, known)


_ring.defvjp(_forward, _backward)
