"""No rank waits for another that took a different branch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts

import fsdp_jax as fsdp

WIDTH, LAYERS = 8, 2
X = np.random.default_rng(0).normal(size=(8, WIDTH))
AXES = ("dp_shard",)


def make_weights(key):
    stack, one = jax.random.split(key)
    return {
        "stack": {"w": jax.random.normal(stack, (LAYERS, WIDTH, WIDTH)) / 3},
        "one": {"w": jax.random.normal(one, (WIDTH, WIDTH)) / 3},
        "root": jnp.ones(()),
    }


def layer(w, x):
    return jnp.tanh(x @ w["w"]), None


ONE = fsdp.unit(lambda w, x: jnp.tanh(x @ w["w"]))


def plan_of(strategy=3, **mesh):
    mesh = fsdp.make_mesh(devices=jax.devices()[:4], **mesh)
    config = fsdp.FSDPConfig(zero_dp_strategy=strategy)
    return fsdp.fully_shard(make_weights, mesh, [fsdp.Stacked("stack"), "one"], config)


def run(loss, plan, **key):
    leaves = jax.tree.leaves(make_weights(jax.random.key(0)))
    placed = jax.device_put(leaves, [m.sharding for m in jax.tree.leaves(plan.params)])
    params = jax.tree.structure(plan.params).unflatten(placed)
    (value, _), grads = fsdp.value_and_grad(plan, loss)(params, X, **key)
    return value, fsdp.unshard(grads)


# What a loss decides by, `decide(weights, x, key)`.


def by_rows(weights, x, key):
    return x[0, 0] > 0


def by_keys(weights, x, key):
    return jax.random.uniform(key) > 0.5


def by_rank(weights, x, key):
    return jax.lax.axis_index("dp_shard") == 0


def by_a_loop_over_rows(weights, x, key):
    return jax.lax.scan(lambda c, row: (c | (row[0] > 1), None), False, x)[0]


def by_a_branch_of_rows(weights, x, key):
    # As inlined code: both results are the same on all ranks, which one is not.
    return jax.lax.cond(x[0, 0] > 0, lambda: True, lambda: False)


def by_other_axes(weights, x, key):
    return jax.lax.psum(x[0, 0], "dp_outer") > 0


def by_pieces(weights, x, key):
    return jax.lax.psum_scatter(jnp.ones(8), "dp_shard", tiled=True)[0] > 0


APART = [by_rows, by_keys, by_rank, by_a_loop_over_rows, by_a_branch_of_rows]
APART += [by_other_axes, by_pieces]


def by_weights(weights, x, key):
    return weights["root"] > 0


def by_all_rows(weights, x, key):
    return jax.lax.pmax((x[0, 0] > 0).astype(int), AXES) > 0


def by_a_count_of_rows(weights, x, key):
    return fsdp.ops.masked_count(x[0, 0] > 0) > 0


def by_the_mean_of_all_rows(weights, x, key):
    return jax.lax.pmean(x, AXES).sum() < 1e9


def by_a_promise(weights, x, key):
    return fsdp.step.assume_replicated(x[0, 0] < 1e9)


TOGETHER = [
    by_weights,
    by_all_rows,
    by_a_count_of_rows,
    by_the_mean_of_all_rows,
    by_a_promise,
]


# What is decided: `loss(decide)(weights, batch, key)`.


def branch(decide):
    def loss(weights, x, key):
        taken = decide(weights, x, key)
        y = jax.lax.cond(taken, lambda x: ONE(weights["one"], x), lambda x: x, x)
        return jnp.mean(y**2)

    return loss


def layer_in_a_switch(decide):
    def loss(weights, x, key):
        index = decide(weights, x, key).astype(int)

        def body(x, w):
            unit = fsdp.unit(lambda w, x: layer(w, x)[0])
            return jax.lax.switch(index, [lambda x: x, lambda x: unit(w, x)], x), None

        x, _ = jax.lax.scan(body, x, weights["stack"])
        return jnp.mean(x**2)

    return loss


@pytest.mark.parametrize("decide", APART)
def test_a_unit_that_ranks_may_enter_apart_is_refused(decide):
    with pytest.raises(
        ValueError, match=facts("dp_shard", "'one'", "cond", "masked_count")
    ):
        run(branch(decide), plan_of(dp_outer=2), key=jax.random.key(0))


def test_a_unit_in_a_switch_in_a_layer_is_refused():
    with pytest.raises(ValueError, match=facts("'stack'", "switch")):
        run(layer_in_a_switch(by_rows), plan_of(), key=jax.random.key(0))


def test_a_layer_of_a_pipeline_that_ranks_may_enter_apart_is_refused():
    def loss(weights, x):
        def unit(w, x):
            some = jax.lax.cond(
                x[0, 0] > 0, lambda x: jax.lax.psum(x, AXES), lambda x: x, x
            )
            return layer(w, some)[0], None

        return jnp.mean(fsdp.scan(unit, weights["stack"], x)[0] ** 2)

    def make(key):
        return {"stack": make_weights(key)["stack"]}

    mesh = fsdp.make_mesh(pp=2, devices=jax.devices()[:4])
    plan = fsdp.fully_shard(make, mesh, [fsdp.Stacked("stack")])
    params = fsdp.init_params(plan, jax.random.key(0))
    with pytest.raises(ValueError, match=facts("psum", "dp_shard", "cond")):
        fsdp.value_and_grad(plan, loss, num_microbatches=2)(params, X)


@pytest.mark.parametrize("decide", TOGETHER)
def test_a_unit_that_all_ranks_enter_or_none_is_right(decide):
    loss = branch(decide)
    with jax.enable_x64(True):
        value, grads = run(loss, plan_of(), key=jax.random.key(0))
        always = branch(lambda *_: jnp.array(True))
        weights = make_weights(jax.random.key(0))
        want = jax.value_and_grad(always)(weights, X, None)
    assert float(value) == pytest.approx(float(want[0]), abs=1e-9)
    np.testing.assert_allclose(grads["one"]["w"], want[1]["one"]["w"], atol=1e-9)


def test_collectives_of_backward_alone_count_and_where_there_is_none_all_is_well():
    with pytest.raises(ValueError, match=facts("reduce_scatter", "dp_shard", "'one'")):
        run(branch(by_rows), plan_of(2), key=jax.random.key(0))

    def chosen(weights, x, key):
        """The same, computed for each row."""
        taken = jnp.repeat(x[::2, :1] > 0, 2, 0)  # Two rows are a rank's.
        return jnp.mean(jnp.where(taken, jnp.tanh(x @ weights["one"]["w"]), x) ** 2)

    with jax.enable_x64(True):
        value, grads = run(branch(by_rows), plan_of(1), key=jax.random.key(0))
        weights = make_weights(jax.random.key(0))
        want = jax.value_and_grad(chosen)(weights, X, None)
    assert float(value) == pytest.approx(float(want[0]), abs=1e-9)
    np.testing.assert_allclose(grads["one"]["w"], want[1]["one"]["w"], atol=1e-9)


def test_branches_may_differ_inside_of_a_unit_and_not_for_each_row_around_it():
    def inside(w, row):
        return jax.lax.cond(
            row[0] > 0, lambda x: jnp.tanh(x @ w["w"]), lambda x: x, row
        )

    def of_rows(weights, x):
        rows = jax.vmap(lambda row: fsdp.unit(inside)(weights["one"], row))(x)
        first = fsdp.unit(inside)(weights["one"], x[0])
        return jnp.mean(rows**2) + jnp.mean(first**2)

    def around(weights, x):
        # jax.vmap selects among the weights, of each row's own.
        one = branch(by_rows)
        return jnp.mean(jax.vmap(lambda row: one(weights, row[None], None))(x))

    def plain(weights, x):
        firsts = [of_rows(weights, x[2 * i : 2 * i + 2]) for i in range(4)]
        return sum(firsts) / 4

    with jax.enable_x64(True):
        value, grads = run(of_rows, plan_of())
        want = jax.value_and_grad(plain)(make_weights(jax.random.key(0)), X)
    assert float(value) == pytest.approx(float(want[0]), abs=1e-9)
    np.testing.assert_allclose(grads["one"]["w"], want[1]["one"]["w"], atol=1e-9)
    with pytest.raises(ValueError, match=facts("one.w")):
        run(around, plan_of())


def until(promise):
    """Applies a unit until the numbers are small."""

    def forward(weights, x):
        def goes_on(x):
            return promise(jnp.abs(x).max() > 1e-2)

        return jax.lax.while_loop(goes_on, lambda x: 0.1 * ONE(weights["one"], x), x)

    return forward


def test_a_loop_that_ranks_may_end_apart_is_refused_unless_vouched_for():
    plan = plan_of()
    params = fsdp.init_params(plan, jax.random.key(0))
    alike = np.broadcast_to(X[:1], X.shape)
    with pytest.raises(
        ValueError, match=facts("'one'", "while_loop", "assume_replicated")
    ):
        fsdp.make_forward(plan, until(lambda flag: flag))(params, alike)
    out = fsdp.make_forward(plan, until(fsdp.step.assume_replicated))(params, alike)
    want = until(lambda flag: flag)(fsdp.unshard(params), alike)
    np.testing.assert_allclose(out, want, atol=1e-6)  # float32


def test_a_state_that_rows_changed_divides_the_next_microbatch():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.seen = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            y = nnx.cond(
                self.seen[...] > 0, lambda m, x: m.one(x), lambda m, x: x, self, x
            )
            self.seen[...] = self.seen[...] + x.mean()
            return y

    mesh = fsdp.make_mesh(devices=jax.devices()[:4])
    plan = fsdp.fully_shard(lambda key: Model(nnx.Rngs(key)), mesh, [nnx.Linear])
    params = fsdp.init_params(plan, jax.random.key(0))
    _, state = plan.model.split(Model(nnx.Rngs(0)))
    compute = fsdp.value_and_grad(plan, lambda m, x: jnp.mean(m(x) ** 2))
    with pytest.raises(ValueError, match=facts("'one'", "cond")):
        compute(params, X.astype(np.float32), model_state=state)
