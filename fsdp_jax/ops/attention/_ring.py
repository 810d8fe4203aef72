"""Attention over a sequence that is split over `cp`: keys and values go round."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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
from fsdp_jax.ops.attention._zigzag import chunks_of, ranks_along

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
) -> Float[Array, "batch seq heads v_head_dim"]:
    """Attends causally over rows whose tokens are split over `axis`.

    Each rank has its queries, and the keys and values of all others come by, from
    neighbour to neighbour, while it computes with those that came before: what a rank
    holds is two parts of a row, however long that is. Backward goes round once more,
    and each part's gradient travels with it. Rows lie in the order of `zigzag`: then
    each step is half of a square on each rank, and none is computed to be masked.

    It is for the `attention` of `bridge.models.Decoder`, with `zigzag_positions` for
    its `positions`; over `tp` besides within `split_heads`. Where `axis` is not manual,
    rows are whole and in order.

    Scores are made a block at a time, and again in backward. What backward needs of
    forward is named `context_attention`: with a `remat_policy` of
    `jax.checkpoint_policies.save_only_these_names("context_attention")` a layer that is
    computed again does not attend again.

    Args:
      query: Of this rank, rotary embedding applied; head `i` reads key head
        `i // (heads / kv_heads)`.
      key: Likewise.
      value: Likewise.
      scale: Multiplies the scores.
      segment_ids: Texts packed in one row see only themselves; None means one text a
        row.
      window: Tokens that a query sees, its own included, those of other ranks too; None
        means all before it.
      softcap: Scores are bent into (-softcap, softcap) by tanh; None leaves them.
      sinks: For each head a score that takes part in the softmax and has no value.
      axis: The mesh axis.

    Returns:
      For each query the mean of the values it attends to.

    Raises:
      ValueError: If a rank's part of a row does not divide into two chunks, or on a
        mesh with pipeline stages.

    Source: Liu et al., Ring Attention, arXiv:2310.01889; Dao, FlashAttention-2,
      arXiv:2307.08691, for backward.
    """
    _check_stages(axis)
    ring = _Ring(form_of(query.shape[1], scale, softcap, axis), axis, ranks_along(axis))
    with jax.named_scope("ring_attention"):
        given = cut(ring.form, query, key, value, segment_ids, window, sinks)
        mixed: Any = _ring(ring, *given)
        return heads_of_blocks(mixed, ring.form.block)


def _check_stages(axis: str) -> None:
    """Refuses a ring in a stage: it would wait for the others without end.

    XLA runs a collective-permute by all devices of a mesh together, and a layer only by
    those of the stage whose turn it is (seen on CPUs: it aborts after 40 s).
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
class _Ring:
    """A ring of ranks.

    Attributes:
      form: How pairs of blocks attend.
      axis: The mesh axis.
      ranks: Devices along it.
    """

    form: Form
    axis: str
    ranks: int

    def send(self, tree: Any) -> Any:
        """To the next rank, from the one before."""
        to = [(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, to), tree)

    def go_round(self, visit: Callable[..., Any], state: Any, keys: Keys) -> Any:
        """`visit(state, keys, pairs, causal=...)` for the keys of each rank in turn.

        The next ones are under way while it computes.
        """
        if self.ranks == 1:
            return visit(state, keys, self._own_pairs(keys), causal=True)
        arriving = self.send(keys)
        state = visit(state, keys, self._own_pairs(keys), causal=True)

        def body(carry, step):
            state, keys = carry
            arriving = self.send(keys)
            state = visit(state, keys, self._pairs(keys, step), causal=False)
            return (state, arriving), None

        steps = jnp.arange(1, self.ranks - 1, dtype=jnp.int32)
        if self.ranks > 2:
            (state, arriving), _ = lax.scan(body, (state, arriving), steps)
        last = self._pairs(arriving, jnp.int32(self.ranks - 1))
        return visit(state, arriving, last, causal=False)

    def _own_pairs(self, keys: Keys) -> Pairs:
        """Two triangles, and the square of the later chunk and the earlier one."""
        own = triangles(self.form, self._rank(), self.ranks, self._length(keys))
        if self.ranks == 1:
            return own
        one, zero = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)
        chunks = chunks_of(self._rank(), self.ranks)
        square = self._of_chunks(keys, (one, chunks[1:]), (zero, chunks[:1]))
        return join_pairs(own, square)

    def _pairs(self, keys: Keys, step: Int[Array, ""]) -> Pairs:
        """What this rank sees of one that is `step` before it: two squares.

        Of a rank with a smaller number both of its chunks see the earlier one, of one
        with a larger number the later of its chunks sees both.
        """
        rank = self._rank()
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

    def _rank(self) -> Int[Array, ""]:
        return lax.axis_index(self.axis) if self.ranks > 1 else jnp.int32(0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: _Ring, asked: Asked, keys: Keys, sinks: Sinks) -> Array:
    return _forward(ring, asked, keys, sinks)[0]


def _forward(ring: _Ring, asked: Asked, keys: Keys, sinks: Sinks):
    def visit(state: Softmax, keys: Keys, pairs: Pairs, *, causal: bool) -> Softmax:
        return attend(ring.form, asked, keys, state, pairs, causal=causal)

    state = ring.go_round(visit, begin(asked.query, keys.value), keys)
    out, log_sum = named(*finish(state, sinks), keys.value.dtype)
    return out, (asked, keys, sinks, out, log_sum)


def _backward(ring: _Ring, saved, grad: Array):
    asked, keys, sinks, out, log_sum = saved
    known = known_of(grad, out, log_sum)

    def visit(grads: Grads, keys: Keys, pairs: Pairs, *, causal: bool) -> Grads:
        fresh = no_grads(asked, keys)._replace(query=grads.query)
        fresh = attend_backward(
            ring.form, asked, keys, known, fresh, pairs, causal=causal
        )
        if causal:  # Its own: nobody has added anything yet.
            return fresh
        # What others added comes while this rank computes its part.
        key, value = ring.send((grads.key, grads.value))
        return Grads(fresh.query, key + fresh.key, value + fresh.value)

    grads = ring.go_round(visit, no_grads(asked, keys), keys)
    query, key, value = (
        x.astype(y.dtype)
        for x, y in zip(grads, (asked.query, keys.key, keys.value), strict=True)
    )
    if ring.ranks > 1:  # Home: they are those of the rank behind this one.
        key, value = ring.send((key, value))
    of_asked, of_keys = Asked(query, None, None), Keys(key, value, None)
    return of_asked, of_keys, sinks_backward(sinks, known)


_ring.defvjp(_forward, _backward)
