"""Recurrences by chunks are those by tokens; states carry on where a text was cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge.models._causal_conv import CausalConv
from bridge.models._delta_rule import gated_delta_rule
from bridge.models._selective_scan import selective_scan
from bridge.models._state_space import state_space

# The largest difference over the largest value, of float32 sums in another order.
RELATIVE = 1e-5
# Two chunks of the delta rule and a part; five of the state space.
SEQ, BATCH, HEADS = 150, 2, 3
CHUNK = 32


def delta_inputs() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    query, key = draw.normal(size=(2, BATCH, SEQ, HEADS, 5))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = draw.normal(size=(BATCH, SEQ, HEADS, 4))
    log_decay = -draw.exponential(0.1, (BATCH, SEQ, HEADS))
    beta = draw.uniform(size=(BATCH, SEQ, HEADS))
    return [query, key, value, log_decay, beta]


def delta_by_token(query, key, value, log_decay, beta, starts) -> np.ndarray:
    state, outs = np.zeros((BATCH, HEADS, 5, 4)), []
    for t in range(SEQ):
        state = state * 0 if t in starts else state
        state = state * np.exp(log_decay[:, t])[..., None, None]
        found = np.einsum("bhkv,bhk->bhv", state, key[:, t])
        learned = (value[:, t] - found) * beta[:, t, :, None]
        state = state + np.einsum("bhk,bhv->bhkv", key[:, t], learned)
        outs.append(np.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return np.stack(outs, 1)


def space_inputs() -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(BATCH, SEQ, HEADS, 4))
    b, c = draw.normal(size=(2, BATCH, SEQ, HEADS, 5))
    return [x, b, c, -draw.exponential(0.1, (BATCH, SEQ, HEADS))]


def space_by_token(x, b, c, log_decay, starts) -> np.ndarray:
    state, outs = np.zeros((BATCH, HEADS, 4, 5)), []
    for t in range(SEQ):
        state = state * 0 if t in starts else state
        state = state * np.exp(log_decay[:, t])[..., None, None]
        state = state + np.einsum("bhp,bhn->bhpn", x[:, t], b[:, t])
        outs.append(np.einsum("bhpn,bhn->bhp", state, c[:, t]))
    return np.stack(outs, 1)


def by_chunks(*inputs, chunk_size=CHUNK, **options):
    return state_space(*inputs, chunk_size=chunk_size, **options)


def scan_inputs() -> list[np.ndarray]:
    draw = np.random.default_rng(2)
    x = draw.normal(size=(BATCH, SEQ, HEADS))
    b, c = draw.normal(size=(2, BATCH, SEQ, 5))
    return [x, b, c, draw.exponential(0.3, x.shape)]


# One decay for each element of each channel's state.
RATE = -np.random.default_rng(3).exponential(0.5, (HEADS, 5))


def scan_by_token(x, b, c, step, starts) -> np.ndarray:
    state, outs = np.zeros((BATCH, HEADS, 5)), []
    for t in range(SEQ):
        state = state * 0 if t in starts else state
        state = state * np.exp(step[:, t, :, None] * RATE)
        state = state + (step[:, t] * x[:, t])[..., None] * b[:, t, None]
        outs.append(np.einsum("bcn,bn->bc", state, c[:, t]))
    return np.stack(outs, 1)


def scanned(*inputs, **options):
    return selective_scan(*inputs, jnp.asarray(RATE, jnp.float32), **options)


CASES = {
    "delta rule": (gated_delta_rule, delta_inputs, delta_by_token),
    "state space": (by_chunks, space_inputs, space_by_token),
    "selective scan": (scanned, scan_inputs, scan_by_token),
}
# Segments that begin within a chunk, at one, and twice in one.
STARTS = (40, 64, 70, 71)


def relative_error(found, want) -> float:
    return float(np.abs(np.asarray(found) - want).max() / np.abs(want).max())


def as_arrays(inputs):
    return [jnp.asarray(x, jnp.float32) for x in inputs]


@pytest.mark.parametrize("name", CASES)
def test_chunks_of_tokens_are_token_after_token(name):
    run, make, by_token = CASES[name]
    inputs = make()
    run = jax.jit(run)
    found, _ = run(*as_arrays(inputs))
    assert relative_error(found, by_token(*inputs, ())) < RELATIVE
    ids = np.searchsorted(STARTS, np.arange(SEQ), side="right")
    ids = jnp.asarray(np.tile(ids, (BATCH, 1)), jnp.int32)
    packed, _ = run(*as_arrays(inputs), segment_ids=ids)
    want = by_token(*inputs, STARTS)
    assert relative_error(packed, want) < RELATIVE
    assert relative_error(found, want) > 100 * RELATIVE


@pytest.mark.parametrize("name", CASES)
def test_a_state_carries_on_where_a_text_was_cut(name):
    run, make, _ = CASES[name]
    inputs = as_arrays(make())
    run, cut = jax.jit(run), 90
    whole, last = run(*inputs)
    first, state = run(*(x[:, :cut] for x in inputs))
    second, end = run(*(x[:, cut:] for x in inputs), state=state)
    joined = jnp.concatenate([first, second], axis=1)
    assert relative_error(joined, np.asarray(whole)) < RELATIVE
    assert relative_error(end, np.asarray(last)) < RELATIVE


def test_the_gradient_of_a_strong_decay_is_finite():
    inputs = as_arrays(delta_inputs())
    inputs[3] = inputs[3] * 1e4

    def total(inputs):
        return gated_delta_rule(*inputs)[0].sum()

    grads = jax.jit(jax.grad(total))(inputs)
    assert all(bool(jnp.isfinite(grad).all()) for grad in grads)


def test_a_convolution_carries_on_behind_the_last_token_of_a_row():
    conv = CausalConv(
        *((4,), 3), bias=True, std=1.0, rngs=nnx.Rngs(0), param_dtype=jnp.float32
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 4)), jnp.float32)
    whole, lengths, cut = conv(x), np.array([5, 2]), 5
    is_token = np.arange(cut)[None] < lengths[:, None]
    # What is behind the last token of a row is not seen.
    given = jnp.where(is_token[..., None], x[:, :cut], jnp.inf)
    first, state = conv.extend(given, jnp.zeros((2, 2, 4)), jnp.asarray(is_token))
    for row, length in enumerate(lengths):
        rest = x[row : row + 1, length:]
        second, _ = conv.extend(rest, state[row : row + 1], None)
        joined = jnp.concatenate([first[row, :length], second[0]])
        np.testing.assert_allclose(joined, whole[row], rtol=1e-6)
