"""Lightning attention: decays of each layer, and what files say of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge.models import Decoder
from bridge.models._lightning import LightningAttention, lightning_slopes

# Two float32 programs that sum in other orders.
TOLERANCE = 1e-5


def by_token(mixer: LightningAttention, x: jax.Array, slopes: np.ndarray):
    """Runs one text, a token after the other."""
    query, key, value, gate = (np.asarray(part)[0] for part in mixer.project(x))
    state, outs = np.zeros((4, 16, 16)), []
    for q, k, v in zip(query, key, value, strict=True):
        state = state * np.exp(-slopes)[:, None, None]
        state = state + np.einsum("hk,hv->hkv", k, v)
        outs.append(np.einsum("hkv,hk->hv", state, q))
    made = mixer.project(x)
    return mixer.finish(made, jnp.asarray(np.stack(outs)[None]))


def test_chunks_are_what_tokens_are_one_after_the_other():
    config = bridge.from_hf_config(hf_fields("minimax"))
    mixer = LightningAttention(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(0), (1, 300, 48))
    slopes = lightning_slopes(config)[1]
    got = mixer.in_layer(jnp.asarray(slopes))(x, None)
    want = by_token(mixer, x, slopes[0, 0])
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


def test_later_layers_decay_less():
    slopes = lightning_slopes(bridge.from_hf_config(hf_fields("minimax")))
    assert slopes.shape == (4, 1, 1, 4)
    # Of the first layer: 1/4, 1/16, ... of four heads.
    np.testing.assert_allclose(slopes[0, 0, 0], 4.0 ** -np.arange(1, 5), rtol=1e-4)
    assert (np.diff(slopes, axis=0) < 0).all()


def test_texts_of_a_packed_row_do_not_see_each_other():
    config = bridge.from_hf_config(hf_fields("minimax"))
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 131, (1, 20)))
    ids = jnp.asarray([[0] * 12 + [1] * 8])
    alone = model(tokens[:, 12:])
    packed = model(tokens, segment_ids=ids)[:, 12:]
    scale = np.abs(alone).max()
    assert np.abs(packed - alone).max() <= TOLERANCE * scale
    assert np.abs(model(tokens)[:, 12:] - alone).max() > 0.01 * scale


def test_every_second_layer_is_lightning_where_the_file_does_not_say():
    config = bridge.from_hf_config(hf_fields("minimax"))
    assert config.layer_types == ("full_attention", "lightning") * 2


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"sliding_window": 9}, ("sliding_window", "9")),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'")),
        ({"layer_types": ["conv"] * 4}, ("layer_types", "conv", "linear_attention")),
    ],
)
def test_a_field_that_says_otherwise_is_refused(changes, said):
    with pytest.raises(ValueError, match=facts(*said)):
        bridge.from_hf_config({**hf_fields("minimax"), **changes})
