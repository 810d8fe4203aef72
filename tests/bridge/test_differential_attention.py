"""Differential attention: factors of layers, packed rows, and what is refused."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge.models import Decoder, DecoderConfig, IndexerConfig
from bridge.models._differential_attention import lambda_starts

# Two float32 programs that sum in other orders.
TOLERANCE = 1e-5


def tiny(**changes) -> DecoderConfig:
    config = bridge.from_hf_config(hf_fields("diffllama"))
    return dataclasses.replace(config, **changes)


def test_later_layers_subtract_more():
    starts = lambda_starts(tiny(num_hidden_layers=30))
    np.testing.assert_allclose(starts[[0, 1, 29]], [0.2, 0.35551, 0.8], atol=2e-4)
    assert (np.diff(starts) > 0).all()


def test_texts_of_a_packed_row_do_not_see_each_other():
    model = Decoder(tiny(), rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 131, (1, 20)))
    ids = jnp.asarray([[0] * 12 + [1] * 8])
    alone = model(tokens[:, 12:])
    packed = model(tokens, segment_ids=ids)[:, 12:]
    scale = np.abs(alone).max()
    assert np.abs(packed - alone).max() <= TOLERANCE * scale
    assert np.abs(model(tokens)[:, 12:] - alone).max() > 100 * TOLERANCE * scale


def test_a_window_holds_for_both_heads_of_a_pair():
    model = Decoder(tiny(sliding_window=4, num_hidden_layers=1), rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 131, (1, 12))
    others = tokens.copy()
    others[:, :8] += 1  # none of which the last token sees
    got, same = model(jnp.asarray(tokens)), model(jnp.asarray(others))
    np.testing.assert_array_equal(got[:, 11], same[:, 11])
    assert np.abs(got[:, 10] - same[:, 10]).max() > 0


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3},
            ("num_key_value_heads 3", "pairs"),
        ),
        ({"attention_gate": True}, ("differential_attention", "attention_gate")),
        ({"indexer": IndexerConfig(2, 8, 4)}, ("differential_attention", "indexer")),
    ],
)
def test_what_does_not_fit_is_refused(changes, said):
    with pytest.raises(ValueError, match=facts(*said)):
        tiny(**changes)
