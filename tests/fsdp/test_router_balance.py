"""Losses, figures and biases that keep routers from wearing out a few experts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compare import host
from jax.sharding import PartitionSpec as P
from tiny_configs import hf_fields

import bridge
import fsdp_jax as fsdp
from bridge.models import (
    DecoderLayer,
    RouterStats,
    correction_bias_paths,
    expert_parallel_rules,
)
from fsdp_jax import ops
from fsdp_jax.cli._routing import (
    CountingDecoder,
    Routing,
    default_aux_loss_coef,
    move_biases,
    router_losses,
)

LAYERS, ROWS, SEQ, EXPERTS, CHOSEN = 3, 8, 6, 4, 2
RATE = 0.25


def used(seed=0):
    """Tokens and scores of each layer, row and expert."""
    random = np.random.default_rng(seed)
    scores = random.dirichlet(np.ones(EXPERTS), size=(LAYERS, ROWS, SEQ))
    chosen = np.argsort(-scores, axis=-1)[..., :CHOSEN]
    tokens = np.eye(EXPERTS, dtype=np.int32)[chosen].sum((2, 3))
    return tokens, scores.sum(2)


@pytest.mark.parametrize("over", ["sequence", "batch", "global"])
@pytest.mark.parametrize("joint", [False, True])
def test_a_balanced_router_has_the_loss_1_and_a_stuck_one_that_of_all_experts(
    over, joint
):
    even = np.full((LAYERS, ROWS, EXPERTS), 3)
    stuck = np.zeros((LAYERS, ROWS, EXPERTS))
    stuck[..., 1] = 12
    for tokens, want in ((even, 1.0), (stuck, EXPERTS)):
        loss = ops.load_balancing_loss(
            jnp.asarray(tokens),
            jnp.asarray(tokens, float),
            over=over,
            joint_layers=joint,
        )
        np.testing.assert_allclose(loss, np.full(() if joint else LAYERS, want))


def test_each_loss_is_the_formula_over_its_own_tokens():
    tokens, scores = used()
    each = SEQ * CHOSEN, SEQ
    by_row = EXPERTS * (tokens / each[0] * scores / each[1]).sum(-1)
    f, p = tokens.sum(1) / (ROWS * each[0]), scores.sum(1) / (ROWS * each[1])
    with jax.enable_x64(True):
        got = {
            over: ops.load_balancing_loss(tokens, jnp.asarray(scores), over=over)
            for over in ("sequence", "batch")
        }
        joint = ops.load_balancing_loss(tokens, jnp.asarray(scores), joint_layers=True)
    np.testing.assert_allclose(got["sequence"], by_row.mean(1))
    np.testing.assert_allclose(got["batch"], EXPERTS * (f * p).sum(-1))
    np.testing.assert_allclose(joint, EXPERTS * (f.mean(0) * p.mean(0)).sum())


def on_eight(fn, out_specs):
    mesh = fsdp.make_mesh(ep=4)
    ranks = P(None, ("dp_shard", "ep"))
    return jax.shard_map(
        fn, mesh=mesh, in_specs=(ranks, ranks), out_specs=out_specs, check_vma=False
    )


def test_the_mean_of_the_ranks_global_losses_is_that_of_the_whole_batch():
    tokens, scores = used()
    axes = ("dp_shard", "ep")

    def mean(over):
        def local(tokens, scores):
            loss = ops.load_balancing_loss(tokens, scores, over=over)
            return jax.lax.pmean(loss.sum(), axes)

        def total(scores):
            return on_eight(local, P())(tokens, scores)

        return jax.value_and_grad(total)(jnp.asarray(scores))

    with jax.enable_x64(True):
        whole = jax.value_and_grad(lambda s: ops.load_balancing_loss(tokens, s).sum())(
            jnp.asarray(scores)
        )
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-12),
            mean("global"),
            whole,
        )
        assert abs(mean("batch")[0] - whole[0]) > 1e-3  # a rank has a single row


def test_a_row_without_tokens_adds_nothing_to_a_loss():
    counts, scores = jnp.array([[2.0, 2.0], [0.0, 0.0]]), jnp.array([[3.0, 1], [0, 0]])

    def loss(scores):
        return ops.load_balancing_loss(counts, scores, over="sequence")

    value, grads = jax.value_and_grad(loss)(scores)
    assert float(value) == pytest.approx(0.5)  # of a balanced row, and none
    assert bool(jnp.isfinite(grads).all())
    assert float(ops.max_expert_load(jnp.zeros((2, 4)), axes=())) == 0


def test_the_load_is_that_of_all_ranks():
    tokens, scores = used()
    got = on_eight(lambda tokens, _: ops.max_expert_load(tokens), P())(tokens, scores)
    totals = tokens.sum(1)
    np.testing.assert_allclose(got, totals.max(-1) / totals.mean(-1), rtol=1e-6)


def test_biases_of_many_layers_move_by_their_own_loads():
    tokens = jnp.array([[0, 2], [3, 3]])
    bias = ops.update_expert_bias(jnp.zeros((2, 2)), tokens, RATE)
    np.testing.assert_array_equal(bias, [[0.25, -0.25], [0.0, 0.0]])


# A decoder whose biases follow the load, from the router to the update


@pytest.fixture(scope="module")
def config():
    return bridge.from_hf_config(hf_fields("deepseek_v3", num_hidden_layers=4))


def make(config, key):
    return CountingDecoder(
        config,
        rngs=nnx.Rngs(key),
        scan=functools.partial(fsdp.scan, prefetch=1),
        dispatch=ops.expert_parallel_dispatch,
    )


def loss_fn(model, tokens):
    states, stats = model.final_states(tokens)
    model.count(stats)
    return jnp.mean(states.astype(jnp.float32) ** 2)


def text(config):
    return np.random.default_rng(0).integers(0, config.vocab_size, (16, 9))


def plan_of(config, mesh):
    fsdp_config = fsdp.FSDPConfig(
        expert_parallel=expert_parallel_rules(config),
        frozen=correction_bias_paths(config),
        mp_policy=fsdp.MixedPrecisionPolicy(
            param_dtype=jnp.bfloat16,
            param_name_patterns_in_fp32=correction_bias_paths(config),
        ),
    )
    make_model = functools.partial(make, config)
    return fsdp.fully_shard(make_model, mesh, [DecoderLayer], fsdp_config)


def test_biases_of_a_decoder_follow_the_tokens_of_all_ranks_and_microbatches(config):
    plan = plan_of(config, fsdp.make_mesh(dp_outer=2, ep=2))
    tx = optax.adamw(1e-3, weight_decay=0.1)
    step = fsdp.make_train_step(
        plan, loss_fn, tx, num_microbatches=2, update_model_state=move_biases(RATE)
    )
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    tokens = text(config)
    model = plan.model.merge(
        jax.tree.map(
            lambda x, param: x.astype(param.precision.param),
            state.params,
            plan.treedef.unflatten(plan.param_plans),
        ),
        state.model_state,
    )
    one = nnx.clone(model)
    one.scan = functools.partial(fsdp.scan, prefetch=0)
    _, stats = jax.jit(lambda m, t: m.final_states(t))(one, tokens)
    totals = np.asarray(stats.tokens_per_expert.sum(1))
    state, _ = step(state, tokens)
    bias = host(state.params)["layers"][1]["mlp"]["router"]["correction_bias"][...]
    assert bias.dtype == np.float32
    assert totals.sum() == 2 * tokens.size * config.moe.num_experts_per_tok
    want = RATE * np.sign(totals.mean(-1, keepdims=True) - totals)
    np.testing.assert_array_equal(bias, want)
    np.testing.assert_array_equal(state.model_state["tokens_per_expert"][...], 0)


@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_the_losses_of_a_decoder_are_weighed_and_reported(config, over):
    tokens, scores = used()
    z_loss, dropped = np.full((LAYERS, ROWS), 2.0), np.ones((LAYERS, ROWS), int)
    stats = RouterStats(*map(jnp.asarray, (tokens, scores, z_loss, dropped)))
    routing = Routing(aux_loss_coef=0.5, aux_loss_over=over, router_z_loss_coef=0.25)
    loss, reported = router_losses(config, routing, stats)
    want = 0.5 * reported["aux_loss"] + 0.25 * LAYERS * 2.0
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    # Of a router in balance transformers' is the experts a token chooses, and
    # DeepSeek's, of which each layer has one, the layers.
    least = LAYERS if over == "sequence" else config.moe.num_experts_per_tok
    assert least * (1 - 1e-6) < reported["aux_loss"] < 2 * least
    assert reported["dropped_choices"] == LAYERS * ROWS
    assert reported["max_expert_load"] >= 1


def test_the_weight_of_the_loss_is_the_config_s(config):
    mixtral = bridge.from_hf_config(hf_fields("mixtral", router_aux_loss_coef=0.02))
    assert default_aux_loss_coef(mixtral) == 0.02
    assert default_aux_loss_coef(config) == 0.0


def test_routers_multiply_in_float32_unless_told_otherwise():
    olmoe = bridge.from_hf_config(hf_fields("olmoe"))
    applied = Routing().apply(olmoe)
    assert applied.moe is not None and applied.moe.float32_logits
    assert Routing(router_dtype="model").apply(olmoe) == olmoe
