"""Positions as sines and cosines: their rows, packed texts, and what is refused."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge.models import Decoder
from bridge.models._token_embedding import sinusoids

# Two float32 programs that sum in other orders.
TOLERANCE = 1e-5


def test_the_first_wave_turns_by_a_radian_and_the_last_by_a_ten_thousandth():
    positions = jnp.asarray([[0, 1, 2048]])
    table = np.asarray(sinusoids(positions, 9, jnp.float32))[0]
    np.testing.assert_array_equal(table[0], [0, 0, 0, 0, 1, 1, 1, 1, 0])
    rates = 1e4 ** -(np.arange(4) / 3)
    np.testing.assert_allclose(table[1, :4], np.sin(rates), rtol=1e-5)
    np.testing.assert_allclose(table[2, 4:8], np.cos(2048 * rates), atol=1e-3)


def test_texts_of_a_packed_row_do_not_see_each_other():
    model = Decoder(bridge.from_hf_config(hf_fields("xglm")), rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 131, (1, 20)))
    ids = jnp.asarray([[0] * 12 + [1] * 8])
    positions = jnp.asarray([[*range(12), *range(8)]])
    alone = model(tokens[:, 12:])
    packed = model(tokens, segment_ids=ids, positions=positions)[:, 12:]
    scale = np.abs(alone).max()
    assert np.abs(packed - alone).max() <= TOLERANCE * scale
    assert np.abs(model(tokens)[:, 12:] - alone).max() > 100 * TOLERANCE * scale


@pytest.mark.parametrize("pad, position", [(7, 5), (-1, 31)])
def test_a_padding_token_whose_row_is_a_position_is_refused(pad, position):
    fields = hf_fields("xglm", pad_token_id=pad, max_position_embeddings=32)
    with pytest.raises(ValueError, match=facts("pad_token_id", pad, position)):
        bridge.from_hf_config(fields)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"learned_positions": True}, ("sinusoidal_positions", "learned")),
        ({"hidden_size": 2, "num_attention_heads": 1}, ("hidden_size 2", "4")),
    ],
)
def test_what_does_not_fit_is_refused(changes, said):
    config = bridge.from_hf_config(hf_fields("xglm"))
    with pytest.raises(ValueError, match=facts(*said)):
        dataclasses.replace(config, **changes)
