"""Keys with a bias made of their values: what it is, packed rows, and long ones."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge.models import Decoder, DecoderConfig, empty_cache

# Two float32 programs that sum in other orders.
TOLERANCE = 1e-5


def tiny(**changes) -> DecoderConfig:
    config = bridge.from_hf_config(hf_fields("doge"))
    return dataclasses.replace(config, **changes)


def random_model(config: DecoderConfig) -> Decoder:
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape) * 0.3, leaf.dtype),
        params,
    )
    return nnx.merge(graph, params)


def test_texts_of_a_packed_row_do_not_see_each_other():
    model = random_model(tiny())
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 131, (1, 20)))
    ids = jnp.asarray([[0] * 12 + [1] * 8])
    alone = model(tokens[:, 12:])
    packed = model(tokens, segment_ids=ids)[:, 12:]
    scale = np.abs(alone).max()
    assert np.abs(packed - alone).max() <= TOLERANCE * scale
    assert np.abs(model(tokens)[:, 12:] - alone).max() > 100 * TOLERANCE * scale


def test_a_bias_of_all_keys_alike_changes_nothing():
    config = tiny()
    model, plain = random_model(config), random_model(config)
    factors = model.layers.self_attn.step_factor
    factors[...] = jnp.zeros_like(factors[...])  # exp(0) for each key
    moved = jax.tree.map(jnp.zeros_like, plain.layers.self_attn.step_proj.kernel[...])
    plain.layers.self_attn.step_proj.kernel[...] = moved  # the same step for each key
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 131, (1, 20)))
    got, want = model(tokens), plain(tokens)
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()
    other = np.abs(random_model(config)(tokens) - want).max()
    assert other > 100 * TOLERANCE * np.abs(want).max()


def test_a_row_of_which_keys_would_be_masked_is_refused():
    model = Decoder(tiny(dynamic_mask_size=16), rngs=nnx.Rngs(0))
    tokens = jnp.zeros((1, 17), jnp.int32)
    assert model(tokens[:, :16]).shape == (1, 16, 131)
    with pytest.raises(ValueError, match=facts("17", "dynamic_mask_size", "16")):
        model(tokens)
    cache = empty_cache(model.config, 1, 17, jnp.float32)
    with pytest.raises(ValueError, match=facts("17", "dynamic_mask_size", "16")):
        model.extend(tokens[:, :1], jnp.zeros((1, 1), jnp.int32), cache)


def test_rows_that_devices_have_in_parts_are_refused():
    said = ("positions", "dynamic_mask_size", "cp=1")
    with pytest.raises(ValueError, match=facts(*said)):
        Decoder(tiny(), rngs=nnx.Rngs(0), positions=lambda tokens: tokens)


def test_experts_are_refused():
    with pytest.raises(ValueError, match=facts("is_moe", "True")):
        bridge.from_hf_config(hf_fields("doge", is_moe=True))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"norm_placement": "parallel"}, ("learned_residual", "'parallel'")),
        ({"attention_gate": True}, ("dynamic_mask_size", "attention_gate")),
        (
            {"differential_attention": True},
            ("differential_attention", "dynamic_mask_size"),
        ),
        (
            {"laurel_rank": 4, "norm_placement": "both"},
            ("learned_residual", "laurel_rank"),
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes, said):
    with pytest.raises(ValueError, match=facts(*said)):
        tiny(**changes)
