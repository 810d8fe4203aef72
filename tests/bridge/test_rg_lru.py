"""Real-gated linear recurrent units: by token, in packed rows, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge.models import Decoder, empty_cache
from bridge.models._rg_lru import RGLRU, _bounded_root

# Two float32 programs that sum in other orders.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def mixer() -> RGLRU:
    config = bridge.from_hf_config(hf_fields("recurrent_gemma"))
    made = RGLRU(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    random = np.random.default_rng(0)
    graph, params = nnx.split(made)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32), params
    )
    return nnx.merge(graph, params)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_token(mixer: RGLRU, x: np.ndarray) -> np.ndarray:
    """Runs the recurrence over convolved inputs, a token after the other."""
    kernels = [
        (np.asarray(gate.kernel[...]), np.asarray(gate.bias[...]))
        for gate in (mixer.decay_gate, mixer.input_gate)
    ]
    rate = np.log1p(np.exp(np.asarray(mixer.decay_rate[...])))
    state, states = np.zeros(x.shape[1:]), []
    for at, token in enumerate(x):
        decays, enters = (
            sigmoid(np.einsum("hi,hio->ho", token, kernel) + bias)
            for kernel, bias in kernels
        )
        decay = np.exp(-8 * decays * rate) if at else np.zeros_like(token)
        state = decay * state + np.sqrt(1 - decay**2) * enters * token
        states.append(state)
    return np.stack(states)


def test_a_scan_is_what_tokens_are_one_after_the_other(mixer):
    x = np.random.default_rng(1).normal(size=(1, 90, 48)).astype(np.float32)
    made = mixer._project(jnp.asarray(x))
    got, memory = mixer._recur(made, None, None, None)
    want = by_token(mixer, np.asarray(made.x, np.float64)[0])
    assert np.abs(got[0] - want).max() <= TOLERANCE * np.abs(want).max()
    np.testing.assert_array_equal(memory.hidden, got[:, -1])
    assert memory.begun.all()


def test_a_row_without_tokens_has_not_begun(mixer):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 48)), jnp.float32)
    config = bridge.from_hf_config(hf_fields("recurrent_gemma"))
    stacked = empty_cache(config, 2, 8, jnp.float32)[0]
    state = jax.tree.map(lambda leaf: leaf[0], stacked)
    is_token = jnp.asarray([[True] * 3 + [False] * 2, [False] * 5])
    first, state = mixer.extend(x, state, is_token)
    np.testing.assert_array_equal(state.memory.begun, [True, False])
    assert not np.asarray(state.memory.hidden[1]).any()
    second, _ = mixer.extend(x, state, None)
    alone, whole = mixer(x, None), jnp.concatenate([first[:1, :3], second[:1]], axis=1)
    together = mixer(jnp.concatenate([x[:1, :3], x[:1]], axis=1), None)
    np.testing.assert_allclose(second[1], alone[1], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(whole, together, rtol=TOLERANCE, atol=TOLERANCE)


def test_texts_of_a_packed_row_do_not_see_each_other():
    config = bridge.from_hf_config(hf_fields("recurrent_gemma"))
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 131, (1, 20)))
    ids = jnp.asarray([[0] * 12 + [1] * 8])
    alone = model(tokens[:, 12:])
    packed = model(tokens, segment_ids=ids)[:, 12:]
    scale = np.abs(alone).max()
    assert np.abs(packed - alone).max() <= TOLERANCE * scale
    assert np.abs(model(tokens)[:, 12:] - alone).max() > 100 * TOLERANCE * scale


def test_the_slope_of_the_root_is_bounded():
    x = jnp.asarray([0.0, 1e-12, 0.25, 1.0])
    np.testing.assert_allclose(_bounded_root(x), np.sqrt(x))
    slopes = jax.vmap(jax.grad(_bounded_root))(x)
    np.testing.assert_allclose(slopes, [1000.0, 1000.0, 1.0, 0.5], rtol=1e-6)


def test_types_repeat_and_the_units_are_as_wide_as_the_stream():
    fields = {**hf_fields("recurrent_gemma"), "num_hidden_layers": 5}
    config = bridge.from_hf_config({**fields, "lru_width": None})
    attends = "sliding_attention"
    assert config.layer_types == (*("rg_lru", "rg_lru", attends), "rg_lru", "rg_lru")
    assert config.rg_lru is not None and config.rg_lru.head_dim == 12
    assert config.intermediate_size == 40  # half of what the file says
    assert bridge.to_hf_config(config)["intermediate_size"] == 80


def test_the_factor_of_embeddings_is_one_of_bfloat16():
    config = bridge.from_hf_config(hf_fields("recurrent_gemma"))
    assert config.embedding_multiplier == 6.9375  # the root of 48 is 6.928


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"lru_width": 66}, ("lru_width", "66", "4")),
        ({"block_types": ["conv"]}, ("block_types", "conv", "recurrent")),
        ({"block_types": []}, ("block_types", "empty")),
        ({"hidden_activation": "xielu"}, ("hidden_act", "'xielu'", "rg_lru")),
    ],
)
def test_a_field_that_says_otherwise_is_refused(changes, said):
    with pytest.raises(ValueError, match=facts(*said)):
        bridge.from_hf_config({**hf_fields("recurrent_gemma"), **changes})
