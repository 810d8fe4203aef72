"""Experts that were chosen before are chosen again, and only their weights are new."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.compare import host, worst
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge.models import Decoder, DecoderConfig

TOKENS = jax.random.randint(jax.random.key(0), (2, 9), 0, 64)
# Two programs of the same sums, in float32.
ROUNDING = 1e-5
# One of each way to score: softmax, groups of sigmoids with a bias behind a dense
# layer, and the softmax of the chosen.
FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss")


@functools.cache
def config_of(family: str) -> DecoderConfig:
    return bridge.from_hf_config(hf_fields(family, vocab_size=64))


@functools.cache
def decoder(family: str) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(Decoder(config_of(family), rngs=nnx.Rngs(jax.random.key(1))))


@functools.partial(jax.jit, static_argnums=0)
def chosen(graph, state):
    return nnx.merge(graph, state).chosen_experts(TOKENS)


@functools.partial(jax.jit, static_argnums=0)
def run(graph, state, experts=None):
    """The loss, the tokens of each expert, and the gradients."""

    def loss(state):
        model = nnx.merge(graph, state)
        logits, stats = model.with_router_stats(TOKENS, experts=experts)
        return jnp.mean(logits**2), stats.tokens_per_expert

    return jax.value_and_grad(loss, has_aux=True)(state)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_that_a_decoder_chose_give_what_they_gave(family):
    graph, state = decoder(family)
    experts = chosen(graph, state)
    moe = config_of(family).moe
    assert experts.shape[1:] == (2, 9, moe.num_experts_per_tok)
    counts = run(graph, state)[0][1]
    np.testing.assert_array_equal(tokens_per_expert(experts, moe), counts)
    (loss, replayed), grads = run(graph, state, experts)
    (want_loss, _), want = run(graph, state)
    np.testing.assert_array_equal(replayed, counts)
    assert abs(loss - want_loss) <= ROUNDING * abs(want_loss)
    # The correction bias has no gradient.
    zero = ("correction_bias", "correction_bias.value")
    assert worst(host(grads), host(want), without=zero) < ROUNDING


def tokens_per_expert(experts, moe):
    return jax.nn.one_hot(experts, moe.num_experts).sum((2, 3))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_experts_run_with_their_own_weights(family):
    graph, state = decoder(family)
    experts = chosen(graph, state)
    moe = config_of(family).moe
    others = (experts + 1) % moe.num_experts
    (loss, tokens), grads = run(graph, state, others)
    np.testing.assert_array_equal(tokens, tokens_per_expert(others, moe))
    assert abs(loss - run(graph, state)[0][0]) > 1e-6
    gates = [g for path, g in nnx.to_flat_state(grads) if "gate" in path]
    assert any(np.abs(g[...]).max() > 0 for g in gates)  # Routers still learn.


def test_experts_of_another_shape_are_refused():
    model = nnx.merge(*decoder("mixtral"))
    with pytest.raises(ValueError, match=facts("(1, 2, 9, 2)", "(2, 9)")):
        model.final_states(TOKENS, experts=jnp.zeros((1, 2, 9, 2), jnp.int32))
    dense = nnx.eval_shape(
        lambda: Decoder(
            bridge.from_hf_config(hf_fields("llama")), rngs=nnx.Rngs(jax.random.key(0))
        )
    )
    with pytest.raises(ValueError, match=facts("moe=None")):
        dense.chosen_experts(TOKENS)
    with pytest.raises(ValueError, match=facts("experts=")):
        dense.final_states(TOKENS, experts=jnp.zeros((0, 2, 9, 2), jnp.int32))
