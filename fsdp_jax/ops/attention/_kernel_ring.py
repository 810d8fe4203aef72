"""Ring attention whose ranks compute with a fused kernel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fsdp_jax.ops.attention._common import name_residuals
from fsdp_jax.ops.attention._rotation import Ring
from fsdp_jax.ops.attention._sinks import sinks_grad
from fsdp_jax.ops.attention._zigzag import chunks_of

Sinks = Float[Array, " heads"] | None

_LOWEST = -1e30
"""Log-sum-exp of no scores: finite, so that differences with it are numbers."""


class AttentionKernel(Protocol):
    """A fused kernel, hashable, such as `bridge.models.FlashKernel`.

    `scores` has the fields of `Scores`, `mask` those of `Mask`.
    """

    def forward(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch keys kv_heads head_dim"],
        value: Float[Array, "batch keys kv_heads v_head_dim"],
        scores: Any,
        mask: Any,
        window: Any = None,
    ) -> tuple[
        Float[Array, "batch seq heads v_head_dim"], Float[Array, "batch heads seq"]
    ]:
        """Returns the attention output, and the log-sum-exp of scores in float32.

        Of a query that sees no key they are 0 and a number of at most -1e29, not an
        infinity, which would make the sum over ranks not a number.
        """
        ...

    def backward(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch keys kv_heads head_dim"],
        value: Float[Array, "batch keys kv_heads v_head_dim"],
        out: Float[Array, "batch seq heads v_head_dim"],
        log_sum: Float[Array, "batch heads seq"],
        grad: Float[Array, "batch seq heads v_head_dim"],
        scores: Any,
        mask: Any,
        window: Any = None,
    ) -> tuple[Array, Array, Array]:
        """Returns the gradients of queries, keys and values.

        `out` and `log_sum` are those over all keys of the row, `grad` is the cotangent
        of `out`.
        """
        ...


# `Scores`, `Tokens` and `Mask` have the fields of those of `bridge.models`, whose
# kernels read them: the two packages may not import each other.


@dataclasses.dataclass(frozen=True)
class Scores:
    """Static parameters of the scores: their factor, and their bound or None."""

    scale: float
    softcap: float | None


class Tokens(NamedTuple):
    """Positions of tokens in their rows, and segments; None for one per row."""

    positions: Int[Array, "batch seq"]
    segments: Int[Array, "batch seq"] | None


@dataclasses.dataclass(frozen=True)
class Mask:
    """Keys that queries see; not causal if all keys are before all queries."""

    queries: Tokens
    keys: Tokens
    causal: bool


class KeyValues(NamedTuple):
    """Keys, values and segments of a rank's tokens, which rotate."""

    key: Float[Array, "batch seq kv_heads head_dim"]
    value: Float[Array, "batch seq kv_heads v_head_dim"]
    segments: Int[Array, "batch seq"] | None


class Given(NamedTuple):
    """Arguments of this rank.

    Attributes:
      query: Queries.
      keys: Keys, values and segments.
      sinks: Scores per head without a value; None for none.
      window: Tokens that a query sees; None for all before it.
    """

    query: Float[Array, "batch seq heads head_dim"]
    keys: KeyValues
    sinks: Sinks
    window: Int[Array, ""] | None


@dataclasses.dataclass(frozen=True)
class KernelRing(Ring):
    """A ring whose ranks attend by a kernel.

    Attributes:
      kernel: Fused kernel.
      scores: Static parameters of the scores.
    """

    kernel: AttentionKernel
    scores: Scores

    def tokens(self, keys: KeyValues, step: Int[Array, ""] | int) -> Tokens:
        """Returns positions and segments of keys that were sent `step` times."""
        batch, seq = keys.key.shape[:2]
        row = jnp.arange(seq, dtype=jnp.int32)
        if self.ranks > 1:
            chunks = chunks_of((self.rank() - step) % self.ranks, self.ranks)
            half = seq // 2
            row = (chunks[:, None] * half + row[None, :half]).ravel()
        return Tokens(jnp.broadcast_to(row, (batch, seq)), keys.segments)

    def is_earlier_source(self, step: Int[Array, ""]) -> Array:
        """Returns whether keys sent `step` times are those of a smaller rank.

        They come from rank `(rank - step) % ranks`, which is smaller unless it wraps.
        """
        return step <= self.rank()


class QuerySide(NamedTuple):
    """Per-query inputs of the backward pass.

    Attributes:
      query: Queries.
      out: Attention output over all keys.
      log_sum: Log-sum-exp of the scores over all keys, and of the sink.
      grad: Cotangent of `out`.
    """

    query: Float[Array, "batch seq heads head_dim"]
    out: Float[Array, "batch seq heads v_head_dim"]
    log_sum: Float[Array, "batch heads seq"]
    grad: Float[Array, "batch seq heads v_head_dim"]

    def second_half(self) -> QuerySide:
        """Returns the later chunk of this rank's two."""
        query, out, grad = _half((self.query, self.out, self.grad), 1)
        return QuerySide(query, out, jnp.split(self.log_sum, 2, axis=2)[1], grad)


def kernel_ring(ring: KernelRing, given: Given) -> Array:
    """Computes ring attention; `given` are the arguments of this rank."""
    return _ring(ring, given.query, given.keys, given.sinks, given.window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: KernelRing, query: Array, keys: KeyValues, sinks: Sinks, window: Any):
    return _forward(ring, query, keys, sinks, window)[0]


# What a rank computes in each step:
#
#     step | keys from      | queries used | keys used   | mask
#     -----+----------------+--------------+-------------+-------
#     0    | this rank      | both chunks  | both chunks | causal
#     1..  | a smaller rank | both chunks  | first chunk | none
#     1..  | a larger rank  | second chunk | both chunks | none
#
# By the zigzag order rank r has chunks r and 2 * ranks - 1 - r of the row. So the first
# chunk of a smaller rank is before both chunks here, and its second is after them; both
# chunks of a larger rank lie between the two here. Two chunks of different ranks are
# seen entirely or not at all: no causal mask is needed, and every step after the first
# computes the same number of products on each rank. Windows and segments are masked.
def _forward(
    ring: KernelRing, query: Array, keys: KeyValues, sinks: Sinks, window: Any
):
    own = ring.tokens(keys, 0)

    def visit(state, keys: KeyValues, step):
        if step is None:
            return _attend(ring, query, keys, Mask(own, own, True), window)

        def earlier_source() -> tuple[Array, Array]:
            first, at = _half(keys, 0), _half(ring.tokens(keys, step), 0)
            return _attend(ring, query, first, Mask(own, at, False), window)

        def later_source() -> tuple[Array, Array]:
            mask = Mask(_half(own, 1), ring.tokens(keys, step), False)
            out, log_sum = _attend(ring, _half(query, 1), keys, mask, window)
            # The first chunk of queries sees none of these keys: output 0, log-sum-exp
            # of no scores, so that `_merge` leaves its state as it is.
            unseen = jnp.full_like(log_sum, _LOWEST)
            return _after_zeros(out), jnp.concatenate([unseen, log_sum], -1)

        # Both branches have no collective: ranks may take different ones.
        new = lax.cond(ring.is_earlier_source(step), earlier_source, later_source)
        return _merge(state, new)

    out, log_sum = ring.rotate(visit, None, keys)
    if sinks is not None:
        total = jnp.logaddexp(log_sum, sinks.astype(jnp.float32)[None, :, None])
        out, log_sum = out * _by_token(jnp.exp(log_sum - total)), total
    out, log_sum = name_residuals(out, log_sum, keys.value.dtype)
    return out, (query, keys, sinks, window, out, log_sum)


def _backward(ring: KernelRing, saved, grad: Array):
    query, keys, sinks, window, out, log_sum = saved
    side = QuerySide(query, out, log_sum, grad)
    own = ring.tokens(keys, 0)

    def visit(grads, keys: KeyValues, step):
        if step is None:
            return _grads(ring, side, keys, Mask(own, own, True), window)

        def earlier_source() -> tuple[Array, ...]:
            first, at = _half(keys, 0), _half(ring.tokens(keys, step), 0)
            found = _grads(ring, side, first, Mask(own, at, False), window)
            return found[0], _before_zeros(found[1]), _before_zeros(found[2])

        def later_source() -> tuple[Array, ...]:
            mask = Mask(_half(own, 1), ring.tokens(keys, step), False)
            found = _grads(ring, side.second_half(), keys, mask, window)
            return _after_zeros(found[0]), found[1], found[2]

        of_query, of_key, of_value = lax.cond(
            ring.is_earlier_source(step), earlier_source, later_source
        )
        # The gradient of a part is one step behind the part: its sum so far arrives
        # from the rank that had these keys before, while this rank computes its term.
        key, value = ring.send(grads[1:])
        return grads[0] + of_query, key + of_key, value + of_value

    of_query, key, value = ring.rotate(visit, None, keys)
    of_query, key, value = (
        x.astype(y.dtype)
        for x, y in zip((of_query, key, value), (query, *keys[:2]), strict=True)
    )
    if ring.ranks > 1:
        # The last keys were those of the next rank: return their gradients to it.
        key, value = ring.send((key, value))
    return of_query, KeyValues(key, value, None), _sinks_grad(sinks, side), None


_ring.defvjp(_forward, _backward)


def _attend(ring: KernelRing, query: Array, keys: KeyValues, mask: Mask, window):
    out, log_sum = ring.kernel.forward(query, *keys[:2], ring.scores, mask, window)
    return out.astype(jnp.float32), log_sum


def _grads(ring: KernelRing, side: QuerySide, keys: KeyValues, mask: Mask, window):
    found = ring.kernel.backward(
        side.query,
        keys.key,
        keys.value,
        side.out,
        side.log_sum,
        side.grad,
        ring.scores,
        mask,
        window,
    )
    return tuple(x.astype(jnp.float32) for x in found)


def _merge(state: Any, new: Any) -> tuple[Array, Array]:
    """Merges the softmaxes over two sets of keys.

    Each output is relative to its own log-sum-exp: `exp(log_sum - total)` is the share
    of its keys in the softmax over both.
    """
    (out, log_sum), (new_out, new_log_sum) = state, new
    total = jnp.logaddexp(log_sum, new_log_sum)
    parts = (_by_token(jnp.exp(x - total)) for x in (log_sum, new_log_sum))
    own, other = parts
    return out * own + new_out * other, total


def _sinks_grad(sinks: Sinks, side: QuerySide) -> Sinks:
    if sinks is None:
        return None
    out, grad = (x.astype(jnp.float32) for x in (side.out, side.grad))
    delta = jnp.sum(out * grad, -1).swapaxes(1, 2)
    return sinks_grad(sinks, side.log_sum, delta, (0, 2))


def _by_token(stats: Float[Array, "batch heads seq"]) -> Array:
    return stats.swapaxes(1, 2)[..., None]


def _half(tree: Any, which: int) -> Any:
    """Returns the first (0) or second (1) half of the tokens of each array."""
    return jax.tree.map(lambda x: jnp.split(x, 2, axis=1)[which], tree)


def _before_zeros(x: Array) -> Array:
    return jnp.concatenate([x, jnp.zeros_like(x)], axis=1)


def _after_zeros(x: Array) -> Array:
    return jnp.concatenate([jnp.zeros_like(x), x], axis=1)
