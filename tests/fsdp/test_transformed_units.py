"""Transformations around units compute what they do on one device, or are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.compare import host
from helpers.errors import facts

import fsdp_jax as fsdp

WIDTH, LAYERS = 8, 3
STRATEGIES = {
    "DDP": (0, 0, 1),
    "ZeRO-1": (1, 0, 1),
    "ZeRO-2": (2, 0, 1),
    "ZeRO-3": (3, 0, 1),
    "HSDP": (3, 0, 2),
    "HFSDP": (3, 1, 2),
}
ALL = pytest.mark.parametrize("strategy", STRATEGIES)
# Sums over rows in another order, in float64.
TOLERANCE = 1e-9


def make_weights(key):
    stack, one = jax.random.split(key)
    return {
        "stack": {"w": jax.random.normal(stack, (LAYERS, WIDTH, WIDTH)) / 3},
        "one": {"w": jax.random.normal(one, (WIDTH, WIDTH)) / 3},
    }


UNITS = [fsdp.Stacked("stack"), "one"]


def layer(w, x):
    return jnp.tanh(x @ w["w"]), None


def last(w, x):
    return jnp.tanh(x @ w["w"])


def rows():
    random = np.random.default_rng(0)
    return {name: random.normal(size=(24, WIDTH)) for name in "xy"}


def plan_of(strategy="ZeRO-3", units=UNITS, make=make_weights, **config):
    inner, outer, dp_outer = STRATEGIES[strategy]
    mesh = fsdp.make_mesh(dp_outer=dp_outer, devices=jax.devices()[:4])
    config = fsdp.FSDPConfig(
        zero_dp_strategy=inner, outer_dp_sharding_strategy=outer, **config
    )
    return fsdp.fully_shard(make, mesh, units, config)


def mean_square(out, batch):
    return jnp.mean((out - batch["y"]) ** 2)


def params_of(plan):
    leaves = jax.tree.leaves(make_weights(jax.random.key(0)))
    placed = jax.device_put(leaves, [m.sharding for m in jax.tree.leaves(plan.params)])
    return jax.tree.structure(plan.params).unflatten(placed)


def grads_of(loss, plan, num_microbatches=1):
    compute = fsdp.value_and_grad(plan, loss, num_microbatches=num_microbatches)
    return compute(params_of(plan), rows())


def difference(loss, strategy, num_microbatches=1):
    """The largest, of loss and gradients from those of one device."""
    with jax.enable_x64(True):
        weights = make_weights(jax.random.key(0))
        want, want_grads = jax.value_and_grad(loss)(weights, rows())
        (got, _), grads = grads_of(loss, plan_of(strategy), num_microbatches)
        assert float(got) == pytest.approx(float(want), abs=TOLERANCE)
        pairs = zip(
            jax.tree.leaves(host(grads)), jax.tree.leaves(host(want_grads)), strict=True
        )
        return max(np.abs(got - want).max() for got, want in pairs)


# jax.vmap around a stack that is gathered ahead


def mapped(weights, batch):
    def row(x):
        x, _ = fsdp.scan(layer, weights["stack"], x, prefetch=1)
        return fsdp.unit(last)(weights["one"], x)

    return mean_square(jax.vmap(row)(batch["x"]), batch)


@ALL
def test_a_vmap_around_a_prefetching_scan_adds_each_microbatch_once(strategy):
    assert difference(mapped, strategy, num_microbatches=3) < TOLERANCE


def test_a_vmap_around_a_prefetching_scan_is_right_in_one_microbatch():
    assert difference(mapped, "HFSDP") < TOLERANCE


def test_a_vmap_of_a_vmap_is_right():
    def loss(weights, batch):
        x = batch["x"].reshape(-1, 1, WIDTH)
        run = jax.vmap(lambda x: fsdp.scan(layer, weights["stack"], x, prefetch=1)[0])
        return jnp.mean(jax.vmap(run, 1, 1)(x) ** 2)

    assert difference(loss, "HSDP", num_microbatches=3) < TOLERANCE


# A derivative rule of the user's around a stack


def with_rule(change):
    """The stack's output, its gradients changed by a rule of the user's."""

    def run(stack, x):
        return fsdp.scan(layer, stack, x)[0]

    @jax.custom_vjp
    def ruled(stack, x):
        return run(stack, x)

    def backward(residuals, grad):
        d_stack, dx = jax.vjp(run, *residuals)[1](grad)
        return change(d_stack), dx

    ruled.defvjp(lambda stack, x: (run(stack, x), (stack, x)), backward)

    def loss(weights, batch):
        x = fsdp.unit(last)(weights["one"], ruled(weights["stack"], batch["x"]))
        return mean_square(x, batch)

    return loss


@pytest.mark.parametrize(
    "strategy, num_microbatches",
    [("ZeRO-1", 3), ("ZeRO-2", 3), ("HFSDP", 1), ("HFSDP", 3)],
)
def test_a_rule_that_scales_gradients_scales_each_microbatch_once(
    strategy, num_microbatches
):
    half = np.float64(0.5)  # numpy's, which a trace holds as a constant
    halved = with_rule(lambda grads: jax.tree.map(lambda g: -g * half / 3, grads))
    assert difference(halved, strategy, num_microbatches) < TOLERANCE


CHANGES = {
    "norm": lambda g: g / jnp.maximum(1.0, jnp.linalg.norm(g)),
    "clip": lambda g: jnp.clip(g, -0.1, 0.1),
    "flip": lambda g: jnp.flip(g, 1),
    "ones": jnp.ones_like,
    "noise": lambda g: g + 1e-3,
}


@pytest.mark.parametrize(
    "change, strategy", [("norm", "DDP")] + [(change, "ZeRO-3") for change in CHANGES]
)
def test_a_rule_that_computes_with_a_piece_of_a_gradient_is_refused(change, strategy):
    loss = with_rule(lambda grads: jax.tree.map(CHANGES[change], grads))
    with pytest.raises(ValueError, match=facts("custom_vjp", "stack.w")):
        grads_of(loss, plan_of(strategy))


def test_what_the_forward_of_a_rule_moves_is_refused():
    @jax.custom_vjp
    def ruled(weights, x):
        return fsdp.unit(last)(weights, x)

    def forward(weights, x):
        flipped = jax.tree.map(lambda w: jnp.flip(w, 0), weights)
        return jax.vjp(fsdp.unit(last), flipped, x)

    ruled.defvjp(forward, lambda pull, grad: pull(grad))

    def loss(weights, batch):
        return mean_square(ruled(weights["one"], batch["x"]), batch)

    with pytest.raises(ValueError, match=facts("one.w", "flip")):
        grads_of(loss, plan_of(units=["one"]))


# Derivatives within a loss


def plain(weights, batch):
    x, _ = fsdp.scan(layer, weights["stack"], batch["x"], prefetch=1)
    return mean_square(fsdp.unit(last)(weights["one"], x), batch)


def norm_of_gradient(weights, batch):
    grads = jax.grad(plain)(weights, batch)
    return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("strategy", ["DDP", "ZeRO-3"])
def test_a_derivative_by_a_units_weights_outside_of_it_is_refused(strategy):
    plan = plan_of(strategy)
    params = params_of(plan)

    def loss(weights, batch):
        return plain(weights, batch) + norm_of_gradient(weights, batch)

    def with_aux(weights, batch):
        return plain(weights, batch), norm_of_gradient(weights, batch)

    for call in (
        lambda: fsdp.value_and_grad(plan, loss)(params, rows()),
        lambda: fsdp.value_and_grad(plan, with_aux, has_aux=True)(params, rows()),
        lambda: fsdp.make_eval_step(plan, loss)(params, rows()),
        lambda: fsdp.make_forward(plan, jax.grad(plain))(params, rows()),
    ):
        with pytest.raises(ValueError, match=facts("one.w", "stack.w")):
            call()


def test_a_derivative_by_inputs_is_right():
    def loss(weights, batch):
        def energy(x):
            return plain(weights, {**batch, "x": x}) * x.shape[0]

        return plain(weights, batch) + jnp.mean(jax.grad(energy)(batch["x"]) ** 2)

    assert difference(loss, "HSDP", num_microbatches=3) < TOLERANCE


def test_a_derivative_inside_of_a_unit_is_right():
    @fsdp.unit
    def sharpness(w, x):
        grad = jax.grad(lambda w: jnp.mean(last(w, x[0]) ** 2))(w)
        return jnp.sum(grad["w"] ** 2)

    def loss(weights, batch):
        each = jax.vmap(lambda x: sharpness(weights["one"], x[None]))(batch["x"])
        return jnp.mean(each)

    assert difference(loss, "ZeRO-2", num_microbatches=3) < TOLERANCE


# Maps over weights outside of their units

MOVES = {
    "flip": lambda w: jnp.flip(w, 1),
    "roll": lambda w: jnp.roll(w, 1, 0),
    "reshape": lambda w: w.reshape(-1, 2).T.reshape(w.shape),
    "concatenate": lambda w: jnp.concatenate([w[:, 1:], w[:, :1]], 1),
    "take": lambda w: jnp.take(w, jnp.arange(w.shape[1]), 1, mode="clip"),
}


@pytest.mark.parametrize(
    "move, strategy",
    [(move, "ZeRO-3") for move in MOVES]
    + [("flip", other) for other in ("DDP", "ZeRO-1", "ZeRO-2")],
)
def test_elements_moved_outside_of_their_unit_are_refused(move, strategy):
    def loss(weights, batch):
        moved = jax.tree.map(MOVES[move], weights["one"])
        return mean_square(fsdp.unit(last)(moved, batch["x"]), batch)

    plan = plan_of(strategy)
    with pytest.raises(ValueError, match=facts("one.w")):
        fsdp.make_eval_step(plan, loss)(params_of(plan), rows())


def test_elements_moved_again_in_each_iteration_are_refused():
    def loss(weights, batch):
        def body(carry, _):
            w, x = carry
            x = fsdp.unit(last)(w, x)
            return (jax.tree.map(lambda a: jnp.roll(a, 1, 0), w), x), None

        (_, x), _ = jax.lax.scan(body, (weights["one"], batch["x"]), None, length=2)
        return mean_square(x, batch)

    with pytest.raises(ValueError, match=facts("one.w", "roll")):
        grads_of(loss, plan_of())


def in_reverse(weights, batch):
    stack = jax.tree.map(lambda w: jnp.flip(w, 0), weights["stack"])
    x, _ = fsdp.scan(layer, stack, batch["x"])
    return mean_square(x, batch)


def in_another_order(weights, batch):
    order = jnp.array([2, 0, 1, 0])
    stack = jax.tree.map(lambda w: jnp.take(w, order, 0, mode="clip"), weights["stack"])
    x, _ = fsdp.scan(layer, stack, batch["x"])
    return mean_square(x, batch)


def in_parts(weights, batch):
    first = jax.tree.map(lambda w: w[:2], weights["stack"])
    second = jax.tree.map(lambda w: w[2:], weights["stack"])
    x, _ = fsdp.scan(layer, first, batch["x"])
    x, _ = fsdp.scan(layer, second, x)
    return mean_square(x, batch)


@pytest.mark.parametrize("loss", [in_reverse, in_another_order, in_parts])
def test_layers_may_be_moved(loss):
    assert difference(loss, "HSDP", num_microbatches=3) < TOLERANCE


def test_a_cast_outside_of_its_unit_is_refused():
    def loss(weights, batch):
        weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        out = fsdp.unit(last)(weights["one"], batch["x"].astype(jnp.bfloat16))
        return mean_square(out.astype(jnp.float32), batch)

    with pytest.raises(ValueError, match=facts("one.w", "bfloat16", "param_dtype")):
        grads_of(loss, plan_of())


def test_a_cast_to_the_dtype_that_weights_have_is_none():
    def loss(weights, batch):
        return plain(jax.tree.map(lambda w: w.astype(w.dtype), weights), batch)

    assert difference(loss, "ZeRO-3") < TOLERANCE
