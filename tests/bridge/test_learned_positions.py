"""Texts longer than a table of learned positions are refused: they would be NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from bridge_helpers import abstract_model
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge.models import Decoder, generate

LONGEST = 8
GPT2 = bridge.from_hf_config(hf_fields("gpt2", max_position_embeddings=LONGEST))
LLAMA = bridge.from_hf_config(hf_fields("llama", max_position_embeddings=LONGEST))


def logits(config, length, **positions):
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    call = nnx.jit(lambda model, tokens: model(tokens, **positions))
    return nnx.eval_shape(call, abstract_model(config), tokens)


def test_a_row_behind_the_end_of_the_table_is_refused():
    assert logits(GPT2, LONGEST).shape == (1, LONGEST, GPT2.vocab_size)
    with pytest.raises(ValueError, match=facts("9", "gpt2", "8")):
        logits(GPT2, LONGEST + 1)
    assert logits(LLAMA, LONGEST + 1).shape[1] == LONGEST + 1  # a rope goes on


def test_a_row_of_several_texts_may_be_longer_than_the_table():
    positions = jnp.arange(2 * LONGEST)[None] % LONGEST
    assert logits(GPT2, 2 * LONGEST, positions=positions).shape[1] == 2 * LONGEST


def test_a_continuation_behind_the_end_of_the_table_is_refused():
    model = Decoder(GPT2, rngs=nnx.Rngs(0))
    prompts, lengths = jnp.ones((1, 3), jnp.int32), jnp.asarray([3])
    assert generate(model, prompts, lengths, max_new_tokens=5).tokens.shape == (1, 8)
    with pytest.raises(ValueError, match=facts("max_new_tokens=6", "9", "8")):
        generate(model, prompts, lengths, max_new_tokens=6)
