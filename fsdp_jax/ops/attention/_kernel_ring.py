"""Ring attention whose ranks compute with a fused kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fsdp_jax.ops.attention._common import named
from fsdp_jax.ops.attention._rotation import Ring
from fsdp_jax.ops.attention._zigzag import chunks_of

Sinks = Float[Array, " heads"] | None

_LOWEST = -1e30
"""Log-sum-exp of no scores: finite, so that differences with it are numbers."""


class AttentionKernel(Protocol):
    """A fused kernel, hashable, such as `bridge.models.FlashKernel`.

    `scores` has the fields of `Scores`, `places` those of `Places`.
    """

    @property
    def forward(self) -> Callable[..., tuple[Array, Array]]:
        """Returns the output, and the log-sum-exp `[batch, heads, seq]` in float32.

        The arguments are query, key, value, scores, places and window.
        """
        ...

    @property
    def backward(self) -> Callable[..., tuple[Array, Array, Array]]:
        """Returns the gradients of queries, keys and values.

        The arguments are query, key, value, the output and log-sum-exp over all keys,
        the cotangent of the output, and scores, places and window.
        """
        ...


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
class Places:
    """Places of queries and keys; not causal if all keys are before all queries."""

    queries: Tokens
    keys: Tokens
    causal: bool


class Keys(NamedTuple):
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
    keys: Keys
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

    def tokens(self, keys: Keys, step: Int[Array, ""] | int) -> Tokens:
        """Returns the places of the keys that have come `step` ranks."""
        batch, seq = keys.key.shape[:2]
        row = jnp.arange(seq, dtype=jnp.int32)
        if self.ranks > 1:
            chunks = chunks_of((self.rank() - step) % self.ranks, self.ranks)
            half = seq // 2
            row = (chunks[:, None] * half + row[None, :half]).ravel()
        return Tokens(jnp.broadcast_to(row, (batch, seq)), keys.segments)

    def comes_before(self, step: Int[Array, ""]) -> Array:
        """Returns whether keys that have come `step` ranks are of an earlier rank.

        Then all queries see the first half of the keys; else the second half of the
        queries sees all keys.
        """
        return step <= self.rank()


def kernel_ring(ring: KernelRing, given: Given) -> Array:
    """Computes ring attention; `given` are the arguments of this rank."""
    return _ring(ring, given.query, given.keys, given.sinks, given.window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: KernelRing, query: Array, keys: Keys, sinks: Sinks, window: Any):
    return _forward(ring, query, keys, sinks, window)[0]


def _forward(ring: KernelRing, query: Array, keys: Keys, sinks: Sinks, window: Any):
    own = ring.tokens(keys, 0)

    def visit(state, keys: Keys, step):
        if step is None:
            return _attend(ring, query, keys, Places(own, own, True), window)

        def early() -> tuple[Array, Array]:
            seen, at = _half(keys, 0), _half(ring.tokens(keys, step), 0)
            return _attend(ring, query, seen, Places(own, at, False), window)

        def late() -> tuple[Array, Array]:
            places = Places(_half(own, 1), ring.tokens(keys, step), False)
            out, log_sum = _attend(ring, _half(query, 1), keys, places, window)
            unseen = jnp.full_like(log_sum, _LOWEST)
            return _behind_zeros(out), jnp.concatenate([unseen, log_sum], -1)

        return _merge(state, lax.cond(ring.comes_before(step), early, late))

    out, log_sum = ring.go_round(visit, None, keys)
    if sinks is not None:
        total = jnp.logaddexp(log_sum, sinks.astype(jnp.float32)[None, :, None])
        out, log_sum = out * _by_token(jnp.exp(log_sum - total)), total
    out, log_sum = named(out, log_sum, keys.value.dtype)
    return out, (query, keys, sinks, window, out, log_sum)


def _backward(ring: KernelRing, saved, grad: Array):
    query, keys, sinks, window, out, log_sum = saved
    rows = (query, out, log_sum, grad)
    own = ring.tokens(keys, 0)

    def visit(grads, keys: Keys, step):
        if step is None:
            return _grads(ring, rows, keys, Places(own, own, True), window)

        def early() -> tuple[Array, ...]:
            seen, at = _half(keys, 0), _half(ring.tokens(keys, step), 0)
            found = _grads(ring, rows, seen, Places(own, at, False), window)
            return found[0], _before_zeros(found[1]), _before_zeros(found[2])

        def late() -> tuple[Array, ...]:
            places = Places(_half(own, 1), ring.tokens(keys, step), False)
            found = _grads(ring, _second_rows(rows), keys, places, window)
            return _behind_zeros(found[0]), found[1], found[2]

        of_query, of_key, of_value = lax.cond(ring.comes_before(step), early, late)
        # The sums so far are received while this rank computes its own term.
        key, value = ring.send(grads[1:])
        return grads[0] + of_query, key + of_key, value + of_value

    of_query, key, value = ring.go_round(visit, None, keys)
    of_query, key, value = (
        x.astype(y.dtype)
        for x, y in zip((of_query, key, value), (query, *keys[:2]), strict=True)
    )
    if ring.ranks > 1:
        # The last keys were those of the next rank: return their gradients to it.
        key, value = ring.send((key, value))
    return of_query, Keys(key, value, None), _sinks_grad(sinks, saved[4:], grad), None


_ring.defvjp(_forward, _backward)


def _attend(ring: KernelRing, query: Array, keys: Keys, places: Places, window):
    out, log_sum = ring.kernel.forward(query, *keys[:2], ring.scores, places, window)
    return out.astype(jnp.float32), log_sum


def _grads(ring: KernelRing, rows: Any, keys: Keys, places: Places, window):
    query, out, log_sum, grad = rows
    given = (query, *keys[:2], out, log_sum, grad, ring.scores, places, window)
    return tuple(x.astype(jnp.float32) for x in ring.kernel.backward(*given))


def _merge(state: Any, new: Any) -> tuple[Array, Array]:
    """Merges the softmaxes over two sets of keys."""
    (out, log_sum), (new_out, new_log_sum) = state, new
    total = jnp.logaddexp(log_sum, new_log_sum)
    parts = (_by_token(jnp.exp(x - total)) for x in (log_sum, new_log_sum))
    own, other = parts
    return out * own + new_out * other, total


def _sinks_grad(sinks: Sinks, saved: Any, grad: Array) -> Sinks:
    if sinks is None:
        return None
    out, log_sum = saved
    delta = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), -1)
    weights = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - log_sum)
    return -(weights * delta.swapaxes(1, 2)).sum((0, 2)).astype(sinks.dtype)


def _by_token(stats: Float[Array, "batch heads seq"]) -> Array:
    return stats.swapaxes(1, 2)[..., None]


def _half(tree: Any, which: int) -> Any:
    """Returns the first (0) or second (1) half of the tokens of each array."""
    return jax.tree.map(lambda x: jnp.split(x, 2, axis=1)[which], tree)


def _second_rows(rows: Any) -> Any:
    query, out, log_sum, grad = rows
    second = _half((query, out, grad), 1)
    return second[0], second[1], jnp.split(log_sum, 2, axis=2)[1], second[2]


def _before_zeros(x: Array) -> Array:
    return jnp.concatenate([x, jnp.zeros_like(x)], axis=1)


def _behind_zeros(x: Array) -> Array:
    return jnp.concatenate([jnp.zeros_like(x), x], axis=1)
