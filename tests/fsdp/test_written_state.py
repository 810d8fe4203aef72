"""What a loss writes to a model is kept as it was made, or refused by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.errors import facts

import fsdp_jax as fsdp

MESH = fsdp.make_mesh()
TX = optax.sgd(1e-2)
BATCH = {"x": jnp.ones((16, 8)), "y": jnp.ones((16, 5))}


def trained(value, written, *, kind=nnx.Variable, num_microbatches=1, steps=2):
    """The value of a variable after some steps."""

    class Model(nnx.Module):
        def __init__(self, key):
            self.linear = nnx.Linear(8, 5, rngs=nnx.Rngs(key))
            self.note = kind(value())

    def loss(model, batch):
        y = model.linear(batch["x"])
        model.note.set_value(written(model.note.get_value(), y))
        return jnp.mean((y - batch["y"]) ** 2)

    plan = fsdp.fully_shard(Model, MESH)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    step = fsdp.make_train_step(plan, loss, TX, num_microbatches=num_microbatches)
    for _ in range(steps):
        state, _ = step(state, BATCH)
    (note,) = jax.tree.leaves(state.model_state)
    return note


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.BatchStat])
def test_a_variable_that_holds_a_tree_is_state_or_parameters_leaf_by_leaf(kind):
    class Model(nnx.Module):
        def __init__(self, key):
            self.linear = nnx.Linear(8, 5, rngs=nnx.Rngs(key))
            self.scale = nnx.Param(
                {"up": jnp.ones((1, 5)), "more": [jnp.full((1, 5), 2.0)]}
            )
            self.seen = kind({"count": jnp.int32(0), "mean": jnp.zeros(5)})

    def loss(model, batch):
        scale, seen = model.scale.get_value(), model.seen.get_value()
        y = model.linear(batch["x"]) * scale["up"] * scale["more"][0]
        model.seen.set_value({"count": seen["count"] + 1, "mean": jnp.mean(y, 0)})
        return jnp.mean((y - batch["y"]) ** 2)

    model = Model(jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    batch = BATCH | {"x": jnp.asarray(x)}
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    plan = fsdp.fully_shard(Model, MESH)
    assert {"scale.up", "scale.more.0"} <= {p.name for p in plan.param_plans}
    assert "seen.count, seen.mean" in repr(plan)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    step = fsdp.make_train_step(plan, loss, TX)
    for _ in range(2):
        _, grads = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads)
        state, _ = step(state, batch)
    others = nnx.Not(nnx.Param)
    for got, like in ((state.params, nnx.Param), (state.model_state, others)):
        leaves = jax.tree.leaves(fsdp.sharding.unpack(got))
        want = jax.tree.leaves(nnx.state(model, like))
        for a, b in zip(leaves, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    "value, written, says",
    [
        (lambda: jnp.zeros((), jnp.int32), lambda v, y: v + 0.7, "int32[]"),
        (lambda: jnp.zeros((), bool), lambda v, y: v + 1, "bool[]"),
        (lambda: jnp.zeros(()), lambda v, y: jnp.mean(y, 0), "float32[5]"),
        (lambda: jnp.zeros(()), lambda v, y: v + 1j, "complex64[]"),
    ],
)
def test_another_shape_or_kind_of_number_is_refused(
    value, written, says, num_microbatches
):
    with pytest.raises(ValueError, match=facts("note", says)):
        trained(value, written, num_microbatches=num_microbatches)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_numbers_that_the_dtype_has_are_kept_in_it(num_microbatches):
    def note(value, written):
        return trained(value, written, num_microbatches=num_microbatches)

    half = note(lambda: jnp.zeros((), jnp.bfloat16), lambda v, y: jnp.float32(0.5))
    assert (half.dtype, float(half)) == (jnp.bfloat16, 0.5)
    plain = note(lambda: jnp.zeros(()), lambda v, y: 1.5)
    assert (plain.dtype, float(plain)) == (jnp.float32, 1.5)
    counted = note(lambda: jnp.zeros(()), lambda v, y: v + 1)
    assert float(counted) == 2.0 * num_microbatches


def test_a_tally_of_bools_is_refused():
    with pytest.raises(ValueError, match=facts("Tally")):
        trained(lambda: jnp.zeros((), bool), lambda v, y: ~v, kind=fsdp.step.Tally)


def test_the_second_step_compiles_nothing_whatever_types_the_state_has():
    """Numbers of Python make arrays whose type jax calls weak."""

    def model(key):
        return {"w": jax.random.normal(key, (8, 5)), "n": jnp.asarray(3)}

    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    plan = fsdp.fully_shard(model, MESH)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    step = fsdp.make_train_step(plan, loss, TX)
    state, _ = step(state, BATCH)
    for leaf in jax.tree.leaves(state.model_state):
        assert not leaf.weak_type
    with pytest.MonkeyPatch.context() as patch:
        compiled = []
        backend = jax._src.compiler.backend_compile_and_load
        patch.setattr(
            jax._src.compiler,
            "backend_compile_and_load",
            lambda *a, **k: compiled.append(1) or backend(*a, **k),
        )
        step(state, BATCH)
    assert not compiled


@pytest.mark.parametrize(
    "count, says",
    [
        (lambda: jnp.ones(2), "float32[2]"),
        (lambda: 1j, "complex64[]"),
        (lambda: None, "None"),
        (lambda: "x", "'x'"),
    ],
)
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_count_is_one_real_number(count, says, evaluates):
    plan = fsdp.fully_shard(lambda key: {"w": jax.random.normal(key, (8, 5))}, MESH)
    params = fsdp.init_params(plan, jax.random.key(0))

    def loss(params, batch):
        return jnp.sum((batch["x"] @ params["w"] - batch["y"]) ** 2), count()

    with pytest.raises(ValueError, match=facts("count", says, "mask.sum()")):
        if evaluates:
            fsdp.make_eval_step(plan, loss, calculate_per_token_loss=True)(
                params, BATCH
            )
        else:
            state = fsdp.init_state(plan, TX, params)
            fsdp.make_train_step(plan, loss, TX, calculate_per_token_loss=True)(
                state, BATCH
            )


def test_a_batch_without_rows_is_refused():
    plan = fsdp.fully_shard(lambda key: {"w": jax.random.normal(key, (8, 5))}, MESH)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    step = fsdp.make_train_step(plan, lambda p, b: jnp.mean(b["x"] @ p["w"]), TX)
    with pytest.raises(ValueError, match=facts(0, "rows")):
        step(state, {name: rows[:0] for name, rows in BATCH.items()})


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_complex_weights_of_a_coded_base_stay_as_they_are(base):
    def make(key):
        real, imaginary = jax.random.normal(key, (2, 64, 64))
        units = {"w": real[:16], "z": real + 1j * imaginary}
        return {"u": units, "o": {"w": jnp.ones((64, 16))}}

    weights = make(jax.random.key(0))
    lora = fsdp.LoRAConfig(4, ["o.w"], base=base)
    config = fsdp.FSDPConfig(lora=lora)
    plan = fsdp.fully_shard(make, MESH, units=["u", "o"], config=config)
    placed = jax.tree.map(
        lambda leaf, like: jax.device_put(leaf, like.sharding),
        weights,
        fsdp.training.abstract_base_params(plan),
    )
    params = fsdp.training.add_lora(plan, placed, jax.random.key(1))
    merged = fsdp.unshard(fsdp.training.merge_lora(plan, params))
    np.testing.assert_array_equal(merged["u"]["z"], weights["u"]["z"])
    with pytest.raises(ValueError, match=facts("'u.z'", "complex64")):
        config = fsdp.FSDPConfig(lora=fsdp.LoRAConfig(4, ["u.z"]))
        fsdp.fully_shard(make, MESH, units=["u", "o"], config=config)
