"""Reductions after the last microbatch: in its backward where that is right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host, worst
from helpers.errors import facts
from helpers.hlo import collectives, group_size

import fsdp_jax as fsdp
from fsdp_jax.step._loss import LossForm, loss_of_shards, trace_loss
from fsdp_jax.step._shard import GradReduction, Shard

TX = optax.sgd(0.1, momentum=0.9)
UNITS = [fsdp.Stacked("stack"), "single"]


def make_weights(key):
    return {
        "stack": {"w": 0.3 * jax.random.normal(key, (3, 16, 16))},
        "single": {"w": 0.3 * jax.random.normal(key, (16, 16))},
        "root": jnp.ones(16),
    }


def layer(w, x):
    return x + jnp.tanh(x @ w["w"]), None


def once(weights, x):
    x, _ = fsdp.scan(layer, weights["stack"], x)
    return fsdp.unit(layer)(weights["single"], x)[0]


def scanned_twice(weights, x):
    return once(weights, once(weights, x))


def in_a_loop(weights, x):
    def body(x, _):
        return once(weights, x), None

    return jax.lax.scan(body, x, None, length=2)[0]


def in_a_branch(weights, x):
    # Alike on all ranks: of collectives in a branch, all ranks take the same.
    taken = weights["root"][0] > 0
    return jax.lax.cond(taken, lambda x: once(weights, x), lambda x: x, x)


def sliced_by_hand(weights, x):
    for i in (0, 1, 2, 0):
        x, _ = fsdp.unit(layer)(jax.tree.map(lambda w, i=i: w[i], weights["stack"]), x)
    return fsdp.unit(layer)(weights["single"], x)[0]


def stacked_half(weights, x):
    half = jax.tree.map(lambda w: w[:2], weights["stack"])
    x, _ = fsdp.scan(layer, half, x)
    return fsdp.unit(layer)(weights["single"], x)[0]


def under_jit(weights, x):
    return jax.checkpoint(jax.jit(once))(weights, x)


def not_at_all(weights, x):
    return fsdp.unit(layer)(weights["single"], x)[0]


# What the loss does with the stack -> how often each of its slices is gathered: only
# what is gathered exactly once may be finished where it is gathered.
FORMS = {
    once: 1,
    under_jit: 1,
    scanned_twice: 2,
    in_a_loop: 2,
    in_a_branch: 2,
    sliced_by_hand: 2,
    stacked_half: 2,
    not_at_all: 0,
}


def loss_of(form):
    def loss(weights, batch):
        out = form(weights, batch["x"]) * weights["root"][None]
        return jnp.mean((out - batch["y"]) ** 2)

    return loss


def data():
    random = np.random.default_rng(0)
    return {name: random.normal(size=(24, 16)).astype(np.float64) for name in "xy"}


@pytest.mark.parametrize("form", FORMS)
def test_gathers_are_counted_through_loops_branches_and_slices(form):
    plan = fsdp.fully_shard(
        make_weights, fsdp.make_mesh(devices=jax.devices()[:1]), UNITS
    )
    params = fsdp.init_params(plan, jax.random.key(0))
    shards = [
        Shard(value, jnp.zeros_like(value), None, row, GradReduction())
        for value, row in zip(jax.tree.leaves(params), plan.param_plans, strict=True)
    ]
    loss = loss_of_shards(plan, loss_of(form), LossForm())
    args = (plan.model_state, jax.tree.map(jnp.float32, data()), jax.random.key(0))
    _, gathers = trace_loss(loss, shards, *args)
    singles = 2 if form in (scanned_twice, in_a_loop, in_a_branch) else 1
    assert gathers == {"single.w": singles, "stack.w": FORMS[form]}


@pytest.mark.parametrize(
    "form, inner, outer",
    [(form, 3, 0) for form in FORMS]
    + [(form, *s) for form in (once, scanned_twice) for s in ((0, 0), (3, 1))],
)
def test_however_often_a_stack_is_used_the_numbers_are_those_of_one_device(
    form, inner, outer
):
    results = []
    with jax.enable_x64(True):
        for mesh, k in (
            (fsdp.make_mesh(dp_outer=2), 3),
            (fsdp.make_mesh(devices=jax.devices()[:1]), 1),
        ):
            config = fsdp.FSDPConfig(
                zero_dp_strategy=inner, outer_dp_sharding_strategy=outer
            )
            plan = fsdp.fully_shard(make_weights, mesh, UNITS, config)
            tx = optax.sgd(0.1)
            step = fsdp.make_train_step(plan, loss_of(form), tx, num_microbatches=k)
            params = fsdp.init_params(plan, jax.random.key(0))
            state, _ = step(fsdp.init_state(plan, tx, params), data())
            results.append(host(state.params))
    assert worst(*results) < 1e-9


def lowered(form, mesh, **config):
    plan = fsdp.fully_shard(
        make_weights, fsdp.make_mesh(**mesh), UNITS, fsdp.FSDPConfig(**config)
    )
    step = fsdp.make_train_step(plan, loss_of(form), TX, num_microbatches=3)
    rows = jax.tree.map(np.float32, data())
    return step.lower(fsdp.abstract_state(plan, TX), rows).compile().as_text()


@pytest.mark.parametrize("form", [once, scanned_twice])
def test_each_gradient_crosses_the_outer_axis_once_a_step(form):
    found = collectives(lowered(form, {"dp_outer": 2}))
    outer = [c for c in found if c.op == "all-reduce" and group_size(c.groups) == 2]
    elements = sum(c.size * (3 if c.loops else 1) for c in outer)
    # A loop that reduces one layer behind reduces zeros in its first iteration.
    layers = 3 + (form is once)
    assert elements == (layers * 256 + 256) // 4 + 16 // 4
    assert bool([c for c in outer if c.loops]) == (form is once)


def test_one_level_of_zero_3_has_one_copy_of_the_model_in_its_program():
    text = lowered(once, {})
    assert all(len(c.loops) >= 1 for c in collectives(text) if c.op == "reduce-scatter")


def test_replicated_parameters_of_a_sharded_plan_do_not_cost_a_second_copy():
    text = lowered(once, {}, replicated=("root",))
    assert all(len(c.loops) >= 1 for c in collectives(text) if c.op == "reduce-scatter")


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
def test_per_token_losses_are_finished_alike(per_token):
    def loss(weights, batch):
        error = (once(weights, batch["x"]) - batch["y"]) ** 2
        return (error.sum(), error.size) if per_token else error.mean()

    results = []
    with jax.enable_x64(True):
        for mesh, k in (
            (fsdp.make_mesh(dp_outer=2), 3),
            (fsdp.make_mesh(devices=jax.devices()[:1]), 1),
        ):
            plan = fsdp.fully_shard(make_weights, mesh, UNITS)
            tx = optax.sgd(0.1)
            step = fsdp.make_train_step(
                plan, loss, tx, num_microbatches=k, calculate_per_token_loss=per_token
            )
            params = fsdp.init_params(plan, jax.random.key(0))
            state, _ = step(fsdp.init_state(plan, tx, params), data())
            results.append(host(state.params))
    assert worst(*results, without=("root",)) < 1e-9


# What is no gather is misuse.


@pytest.mark.parametrize(
    "penalty, misread",
    [
        (lambda w: sum(jnp.sum(x**2) for x in jax.tree.leaves(w["stack"])), "stack.w"),
        (
            lambda w: jax.tree.reduce(lambda a, x: a + jnp.sum(x), w["single"], 0.0),
            "single.w",
        ),
        (
            lambda w: jax.lax.scan(
                lambda c, x: (c + x["w"].value.sum(), None), 0.0, w["stack"]
            )[0],
            "stack.w",
        ),
        (
            lambda w: jax.lax.while_loop(
                lambda c: c[1] < 1,
                lambda c: (c[0] + jax.tree.leaves(w["single"])[0].sum(), c[1] + 1),
                (0.0, 0),
            )[0],
            "single.w",
        ),
        (
            lambda w: jax.jit(lambda x: x.T.sum())(jax.tree.leaves(w["single"])[0]),
            "single.w",
        ),
    ],
    ids=["penalty", "reduce", "scan", "while", "jit"],
)
@pytest.mark.parametrize("strategy", [0, 3])
def test_a_loss_that_computes_with_shards_is_refused(penalty, misread, strategy):
    def loss(weights, batch):
        return loss_of(once)(weights, batch) + penalty(weights)

    config = fsdp.FSDPConfig(zero_dp_strategy=strategy)
    for mesh in (fsdp.make_mesh(), fsdp.make_mesh(devices=jax.devices()[:1])):
        plan = fsdp.fully_shard(make_weights, mesh, UNITS, config)
        params = fsdp.init_params(plan, jax.random.key(0))
        rows = jax.tree.map(np.float32, data())
        with pytest.raises(ValueError, match=facts(misread)):
            fsdp.value_and_grad(plan, loss)(params, rows)


def test_a_penalty_on_what_belongs_to_no_unit_is_right():
    def loss(weights, batch):
        return loss_of(once)(weights, batch) + jnp.sum(weights["root"] ** 2)

    plan = fsdp.fully_shard(make_weights, fsdp.make_mesh(), UNITS)
    params = fsdp.init_params(plan, jax.random.key(0))
    fsdp.value_and_grad(plan, loss)(params, jax.tree.map(np.float32, data()))


def test_all_misread_weights_are_named_at_once():
    def loss(weights, batch):
        squares = [jnp.sum(x**2) for x in jax.tree.leaves(weights)]
        return loss_of(once)(weights, batch) + sum(squares)

    plan = fsdp.fully_shard(make_weights, fsdp.make_mesh(), UNITS)
    params = fsdp.init_params(plan, jax.random.key(0))
    with pytest.raises(ValueError, match=facts("single.w, stack.w")):
        fsdp.value_and_grad(plan, loss)(params, jax.tree.map(np.float32, data()))


def test_weights_that_leave_the_loss_as_aux_are_misread():
    def loss(weights, batch):
        return loss_of(once)(weights, batch), {"w": weights["single"]["w"]}

    plan = fsdp.fully_shard(make_weights, fsdp.make_mesh(), UNITS)
    params = fsdp.init_params(plan, jax.random.key(0))
    rows = jax.tree.map(np.float32, data())
    for call in (
        lambda: fsdp.make_eval_step(plan, loss, has_aux=True)(params, rows),
        lambda: fsdp.value_and_grad(plan, loss, has_aux=True)(params, rows),
    ):
        with pytest.raises(ValueError, match=facts("single.w")):
            call()


@pytest.mark.parametrize(
    "move",
    [
        jax.lax.optimization_barrier,
        lambda tree: jax.tree.map(lambda x: x[::-1][::-1], tree),
    ],
    ids=["barrier", "reversed twice"],
)
def test_moving_weights_about_is_no_misuse(move):
    def loss(weights, batch):
        return loss_of(once)(move(weights), batch)

    plan = fsdp.fully_shard(make_weights, fsdp.make_mesh(), UNITS)
    params = fsdp.init_params(plan, jax.random.key(0))
    rows = jax.tree.map(np.float32, data())
    _, got = fsdp.value_and_grad(plan, loss)(params, rows)
    _, want = fsdp.value_and_grad(plan, loss_of(once))(params, rows)
    assert worst(host(got), host(want)) < 1e-6


def test_weights_whose_gradient_is_stopped_have_none():
    def loss(weights, batch):
        return loss_of(once)(jax.tree.map(jax.lax.stop_gradient, weights), batch)

    plan = fsdp.fully_shard(make_weights, fsdp.make_mesh(), UNITS)
    params = fsdp.init_params(plan, jax.random.key(0))
    _, grads = fsdp.value_and_grad(plan, loss)(params, jax.tree.map(np.float32, data()))
    assert not any(np.asarray(grad).any() for grad in jax.tree.leaves(grads))
