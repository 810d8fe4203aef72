"""Tokens reach their experts on other ranks, and come back; none is lost in silence."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.errors import facts
from helpers.experts import CHOSEN, EMBED, EXPERTS, WIDTH, run_experts
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax import ops

TOKENS = 40  # of all ranks


def weights():
    normal = np.random.default_rng(1).normal
    return {
        "up": normal(size=(EXPERTS, EMBED, WIDTH)),
        "gain": normal(size=(EXPERTS, 3)),
        "bias": normal(size=(EXPERTS, WIDTH)),
        "down": normal(size=(EXPERTS, WIDTH, EMBED)),
    }


def tokens(crowded=False):
    random = np.random.default_rng(0)
    x = random.normal(size=(TOKENS, EMBED))
    scores = random.random((TOKENS, EXPERTS))
    if crowded:  # All of them choose experts of the second rank.
        scores[:, [2, 3]] += 1
    experts = np.argsort(-scores, axis=-1)[:, :CHOSEN]
    return x, experts, np.take_along_axis(scores, experts, axis=-1)


def by_hand(w, x, experts, chosen_weights, taken=None):
    """What each token's experts make of it, one token at a time."""
    taken = np.ones(experts.shape, bool) if taken is None else taken
    y = np.zeros_like(x)
    for t, c in np.argwhere(taken):
        e = experts[t, c]
        hidden = np.tanh(x[t] @ w["up"][e] + w["bias"][e]) * w["gain"][e].sum()
        y[t] += chosen_weights[t, c] * (hidden @ w["down"][e])
    return y


def on_ranks(dispatch, ranks):
    """`fn(weights, x, experts, chosen weights)` on global arrays, over `ranks`."""

    def local(w, x, experts, chosen_weights):
        run = functools.partial(run_experts, w)
        return dispatch(run, x, experts, chosen_weights, EXPERTS)

    mesh = fsdp.make_mesh(ep=ranks, devices=jax.devices()[:ranks])
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
        check_vma=False,
    )
    return jax.jit(mapped)


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("crowded", [False, True], ids=["mixed", "to one rank"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_token_has_the_word_of_all_its_experts(ranks, crowded):
    given = tokens(crowded)
    y, dropped = on_ranks(ops.expert_parallel_dispatch, ranks)(weights(), *given)
    np.testing.assert_allclose(y, by_hand(weights(), *given), atol=1e-12)
    assert not dropped.any()


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    "dispatch",
    [
        ops.expert_parallel_dispatch,
        functools.partial(ops.expert_capacity_dispatch, capacity_factor=4.0),
    ],
    ids=["dropless", "capacity"],
)
def test_a_choice_of_none_adds_nothing_on_any_number_of_ranks(dispatch, ranks):
    x, experts, chosen_weights = tokens()
    taken = np.random.default_rng(2).random(experts.shape) < 0.7
    given = np.where(taken, experts, EXPERTS)

    def one_more(rows, sizes):  # also of rows that are of no expert
        return rows + 1

    def local(x, experts, chosen_weights):
        return dispatch(one_more, x, experts, chosen_weights, EXPERTS)[0]

    mesh = fsdp.make_mesh(ep=ranks, devices=jax.devices()[:ranks])
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
    )
    factors = (chosen_weights * taken).sum(-1, keepdims=True)
    y = jax.jit(mapped)(x, given, chosen_weights)
    np.testing.assert_allclose(y, (x + 1) * factors, atol=1e-12)
    grads = jax.jit(jax.grad(lambda x: mapped(x, given, chosen_weights).sum()))(x)
    np.testing.assert_allclose(grads, np.ones_like(x) * factors, atol=1e-12)


def test_tokens_that_went_to_other_experts_would_be_noticed():
    x, experts, chosen_weights = tokens()
    other = by_hand(weights(), x, (experts + 1) % EXPERTS, chosen_weights)
    assert np.abs(other - by_hand(weights(), x, experts, chosen_weights)).max() > 1


def test_gradients_are_those_of_experts_on_one_device():
    x, experts, chosen_weights = tokens()

    def grads(ranks):
        dispatch = on_ranks(ops.expert_parallel_dispatch, ranks)

        def loss(w, x, chosen_weights):
            return jnp.sin(dispatch(w, x, experts, chosen_weights)[0]).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(weights(), x, chosen_weights)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), grads(4), grads(1)
    )


def taken_by(capacity, experts, ranks):
    """The choices that are taken: of each rank all first ones, then all second ones."""
    taken = np.zeros(experts.shape, bool)
    for rows in np.split(np.arange(len(experts)), ranks):
        room = np.full(EXPERTS, capacity)
        for c in range(CHOSEN):
            for t in rows:
                taken[t, c] = room[experts[t, c]] > 0
                room[experts[t, c]] -= 1
    return taken


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("factor", [0.5, 1.25, 8.0])
def test_an_expert_takes_what_it_has_room_for_and_the_rest_is_counted(ranks, factor):
    x, experts, chosen_weights = tokens(crowded=True)
    dispatch = functools.partial(ops.expert_capacity_dispatch, capacity_factor=factor)
    y, dropped = on_ranks(dispatch, ranks)(weights(), x, experts, chosen_weights)
    capacity = int(np.ceil(factor * TOKENS / ranks * CHOSEN / EXPERTS))
    taken = taken_by(capacity, experts, ranks)
    want = by_hand(weights(), x, experts, chosen_weights, taken)
    np.testing.assert_allclose(y, want, atol=1e-12)
    np.testing.assert_array_equal(dropped, (~taken).sum(-1))
    assert dropped.any() == (factor < 8)


def test_with_room_for_all_both_dispatches_have_the_same_gradients():
    x, experts, chosen_weights = tokens()

    def grads(dispatch):
        run = on_ranks(dispatch, 4)

        def loss(w, x):
            return jnp.sin(run(w, x, experts, chosen_weights)[0]).sum()

        return jax.grad(loss, argnums=(0, 1))(weights(), x)

    roomy = functools.partial(ops.expert_capacity_dispatch, capacity_factor=8.0)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11),
        grads(roomy),
        grads(ops.expert_parallel_dispatch),
    )


def text_of(dispatch, platform):
    shapes = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in tokens()]
    experts = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), weights())
    traced = on_ranks(dispatch, 4).trace(experts, *shapes)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def sent(text, op):
    """Rows of `EMBED` numbers in each of a module's `op`s."""
    found = re.findall(rf"{op}.*?: \(tensor<([\dx]+)xf64>", text)
    return [int(np.prod([int(d) for d in dims.split("x")])) // EMBED for dims in found]


def test_gpus_send_the_rows_that_there_are_and_cpus_a_place_for_each():
    gpu = text_of(ops.expert_parallel_dispatch, "cuda")
    cpu = text_of(ops.expert_parallel_dispatch, "cpu")
    mine = TOKENS // 4
    # There the rows of this rank; back those of all, of which an expert has some.
    assert "all_to_all" not in gpu.replace("ragged_all_to_all", "")
    assert len(re.findall("ragged_all_to_all", gpu)) == 2
    assert "ragged_all_to_all" not in cpu
    most = mine * min(CHOSEN, EXPERTS // 4)
    assert sent(cpu, '"stablehlo.all_to_all"') == [4 * most, 4 * most]


def test_with_a_capacity_as_many_rows_are_sent_however_tokens_choose():
    dispatch = functools.partial(ops.expert_capacity_dispatch, capacity_factor=1.0)
    rows = int(np.ceil(TOKENS / 4 * CHOSEN / EXPERTS)) * EXPERTS
    for platform in ("cpu", "cuda"):
        text = text_of(dispatch, platform)
        assert sent(text, '"stablehlo.all_to_all"') == [rows, rows]


CAPACITY = functools.partial(ops.expert_capacity_dispatch, capacity_factor=1.0)


@pytest.mark.parametrize("dispatch", [ops.expert_parallel_dispatch, CAPACITY])
def test_a_choice_has_the_gradient_of_its_weight_on_any_number_of_ranks(dispatch):
    x, experts, chosen_weights = tokens()

    def gradient(ranks):
        def loss(chosen_weights):
            y, _ = on_ranks(dispatch, ranks)(every_rank, x, experts, chosen_weights)
            return jnp.sin(y).sum()

        every_rank = weights()
        return jax.grad(loss)(chosen_weights)

    if dispatch is CAPACITY:  # Which tokens have room depends on the ranks.
        every = by_hand_gradient(*tokens())
        got = gradient(4)
        kept = got != 0
        assert 0 < kept.sum() < kept.size
    else:
        every, got = by_hand_gradient(*tokens()), gradient(4)
        kept = np.ones_like(got, bool)
        np.testing.assert_allclose(gradient(1), every, atol=1e-9)
        np.testing.assert_allclose(got[kept], every[kept], atol=1e-9)


def by_hand_gradient(x, experts, chosen_weights):
    """The gradient of each weight, from the outputs of the experts by themselves."""
    w, y = weights(), by_hand(weights(), x, experts, chosen_weights)
    grad = np.zeros_like(chosen_weights)
    for t, c in np.ndindex(experts.shape):
        alone = np.zeros(experts.shape, bool)
        alone[t, c] = True
        output = by_hand(w, x, experts, np.ones_like(chosen_weights), alone)[t]
        grad[t, c] = output @ np.cos(y[t])
    return grad


@pytest.mark.parametrize("dispatch", [ops.expert_parallel_dispatch, CAPACITY])
def test_a_recomputed_layer_sends_tokens_five_times(dispatch):
    # There and back, there again to compute anew, and both gradients: outputs that
    # came back are not asked for again.
    x, experts, chosen_weights = tokens()

    def loss(w, x, chosen_weights):
        @jax.checkpoint
        def layer(w, x, chosen_weights):
            return on_ranks(dispatch, 4)(w, x, experts, chosen_weights)[0]

        return jnp.sin(layer(w, x, chosen_weights)).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    text = gradients.lower(weights(), x, chosen_weights).as_text()
    # One number of each choice takes a sixteenth of the room of a token.
    tokens_sent = [n for n in sent(text, '"stablehlo.all_to_all"') if n > EMBED]
    assert len(tokens_sent) == 5


def test_ranks_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(ValueError, match=facts("8 experts", "3 ranks", "'ep'")):
        mesh = fsdp.make_mesh(ep=3, devices=jax.devices()[:3])
        jax.shard_map(
            lambda x: ops.expert_parallel_dispatch(
                lambda rows, _: rows, x, jnp.zeros((1, 1), int), x[:, :1], EXPERTS
            )[0],
            mesh=mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
            check_vma=False,
        )(jnp.ones((3, EMBED)))


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf")])
def test_a_capacity_of_nothing_is_refused(factor):
    with pytest.raises(ValueError, match=facts(f"capacity_factor={factor}")):
        ops.expert_capacity_dispatch(
            lambda rows, _: rows,
            jnp.ones((4, EMBED)),
            jnp.zeros((4, 1), int),
            jnp.ones((4, 1)),
            EXPERTS,
            capacity_factor=factor,
        )
