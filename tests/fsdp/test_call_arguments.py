"""What a step, a loss and a plan are called with is checked before anything runs."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.errors import facts
from jax import lax

import fsdp_jax as fsdp

MESH = fsdp.make_mesh()
TX = optax.adam(1e-2)
ROWS, WIDTH = 16, 8
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)


def make_weights(key, width=WIDTH):
    # Devices do not divide the bias: it is padded.
    return {"w": jax.random.normal(key, (width, width)), "b": jnp.zeros(3)}


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)


def make_state(plan, tx=TX, **options):
    params = fsdp.init_params(plan, jax.random.key(0))
    return fsdp.init_state(plan, tx, params, **options)


@pytest.fixture(scope="module")
def plan():
    return fsdp.fully_shard(make_weights, MESH)


@pytest.fixture(scope="module")
def step(plan):
    return fsdp.make_train_step(plan, loss_fn, TX)


def three_steps(step, state):
    losses = []
    for _ in range(3):
        state, metrics = step(state, X)
        losses.append(metrics["loss"])
    return state, np.array(losses)


def assert_same(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for a, b in pairs:
        assert a.sharding == b.sharding
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


def test_a_step_runs_within_scan_and_a_loop_and_jit_as_it_does_alone(plan, step):
    want, losses = three_steps(step, make_state(plan))
    batches = jnp.stack([X, X, X])
    scanned, metrics = lax.scan(step, make_state(plan), batches)
    assert_same(scanned, want)
    np.testing.assert_array_equal(metrics["loss"], losses)
    loop = jax.jit(lambda state: lax.fori_loop(0, 3, lambda _, s: step(s, X)[0], state))
    assert_same(loop(make_state(plan)), want)
    assert_same(three_steps(jax.jit(step), make_state(plan))[0], want)


def test_a_step_that_raises_on_the_host_is_refused_within_jit(plan):
    step = fsdp.make_train_step(plan, loss_fn, TX, on_nonfinite="raise")
    with pytest.raises(ValueError, match=facts("on_nonfinite='skip'")):
        jax.jit(step)(make_state(plan), X)


def test_a_step_within_jit_says_that_its_options_are_not_used(plan, step, caplog):
    options = {"xla_embed_ir_in_executable": True}
    with_options = dataclasses.replace(step, compiler_options=options)
    with caplog.at_level(logging.WARNING, "fsdp_jax"):
        jax.jit(with_options)(make_state(plan), X)
    (line,) = caplog.messages
    assert "compiler_options=step.compiler_options" in line


def test_a_donated_state_is_refused_wherever_it_is_used_again(plan, step, tmp_path):
    old = make_state(plan)
    kept = jax.tree.map(jnp.copy, old)
    new, _ = step(old, X)
    again = dataclasses.replace(old, step=jnp.int32(5))
    uses = {
        "step": lambda: step(old, X),
        "step of a part": lambda: step(again, X),
        "eval": lambda: fsdp.make_eval_step(plan, loss_fn)(old.params, X),
        "grad": lambda: fsdp.value_and_grad(plan, loss_fn)(old.params, X),
        "save": lambda: fsdp.save(tmp_path / "run", old),
    }
    for use in uses.values():
        with pytest.raises(ValueError, match=facts("step(state, batch)")):
            use()
    assert_same(step(kept, X)[0], new)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("what", ["another step", "a move to the host"])
def test_a_state_that_a_step_returned_is_refused_once_something_else_took_it(
    plan, step, what
):
    state, _ = step(make_state(plan), X)
    if what == "another step":
        taken, _ = fsdp.make_train_step(plan, loss_fn, TX)(state, X)
    else:
        taken = fsdp.training.offload_state(state)
    with pytest.raises(ValueError, match=facts("step(state, batch)", "deleted")):
        step(state, X)
    del taken


def test_numbers_and_lists_in_a_given_optimizer_state_are_refused_by_name(plan):
    params = fsdp.init_params(plan, jax.random.key(0))
    given = optax.tree.set(TX.init(params), count=1000)
    with pytest.raises(ValueError, match=facts("count: int, wanted int32[]")):
        fsdp.init_state(plan, TX, params, opt_state=given)
    with pytest.raises(ValueError, match=facts("w: float, planned float32[8, 8]")):
        fsdp.init_state(plan, TX, params | {"w": 1.0})
    with pytest.raises(ValueError, match=facts("init_state(key=0)")):
        fsdp.init_state(plan, TX, params, key=0)
    given = optax.tree.set(given, count=jnp.int32(1000))
    state = fsdp.init_state(plan, TX, params, opt_state=given)
    assert optax.tree.get(state.opt_state, "count") == 1000


def test_a_state_of_another_plan_or_optimizer_is_refused_with_all_differences(plan):
    step = fsdp.make_train_step(plan, loss_fn, TX)
    ddp = fsdp.FSDPConfig(zero_dp_strategy="no_shard")
    four = fsdp.make_mesh(devices=jax.devices()[:4])
    others = {
        ("params.w", "P('dp_shard',)", "opt_state.0.nu.b"): make_state(
            fsdp.fully_shard(make_weights, MESH, config=ddp)
        ),
        ("params.w", "{'dp_shard': 4}", "{'dp_shard': 8}"): make_state(
            fsdp.fully_shard(make_weights, four)
        ),
        ("params.w", "float32[16, 16]", "opt_state.0.mu.w"): make_state(
            fsdp.fully_shard(lambda key: make_weights(key, 16), MESH)
        ),
        ("opt_state.0.trace.w", "opt_state.0.mu.w"): make_state(
            plan, optax.sgd(1e-2, momentum=0.9)
        ),
    }
    for says, state in others.items():
        with pytest.raises(ValueError, match=facts(*says)):
            step(state, X)
    state = make_state(fsdp.fully_shard(make_weights, MESH)).params
    with pytest.raises(ValueError, match=facts("TrainState", "dict")):
        step(state, X)


def test_a_state_that_is_moved_as_the_error_says_is_taken(plan, step):
    replicated = jax.NamedSharding(MESH, jax.P())
    state = make_state(plan)
    moved = jax.device_put(state, replicated)
    with pytest.raises(ValueError, match=facts("params.w", "jax.device_put(state, ")):
        step(moved, X)
    there = jax.tree.map(lambda x: x.sharding, fsdp.abstract_state(plan, TX))
    new, _ = step(jax.device_put(moved, there), X)
    assert_same(new, step(make_state(plan), X)[0])


def test_scalars_and_the_key_of_a_state_may_be_replaced(plan, step):
    key = jax.random.key(1, impl="rbg")
    state = dataclasses.replace(make_state(plan), step=jnp.int32(7), key=key)
    new, _ = step(state, X)
    assert int(new.step) == 8


def test_a_loss_scale_of_the_step_alone_or_of_the_state_alone_is_refused(plan, step):
    scale = fsdp.training.LossScale()
    scaled = fsdp.make_train_step(plan, loss_fn, TX, loss_scale=scale)
    for call, state in ((scaled, make_state(plan)), (step, None)):
        state = state or make_state(plan, loss_scale=scale)
        with pytest.raises(ValueError, match=facts("loss_scale=...", "init_state")):
            call(state, X)


def test_params_that_are_a_state_or_of_another_model_are_refused(plan):
    state = make_state(plan)
    calls = fsdp.value_and_grad(plan, loss_fn), fsdp.make_eval_step(plan, loss_fn)
    half = jax.tree.map(lambda x: x.astype(jnp.float16), {"w": X[:WIDTH]})
    for call in calls:
        with pytest.raises(ValueError, match=facts("TrainState", "state.params")):
            call(state, X)
        with pytest.raises(
            ValueError, match=facts("b (3,)", "w: float16[8, 8]", "float32[8, 8]")
        ):
            call(half, X)


class FromAnotherLibrary:
    shape, ndim, dtype = (ROWS, WIDTH), 2, "torch.float32"


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": FromAnotherLibrary()}, ("x", "FromAnotherLibrary", "torch.float32")),
        ({"x": X, "name": np.array(["a"] * ROWS)}, ("name", "<U1")),
        ({"x": np.array([None] * ROWS)}, ("x", "object")),
        ({"x": X.tolist()}, ("x.0.0", "123 more", "numpy.asarray(x)")),
    ],
)
def test_a_batch_of_other_things_than_arrays_is_refused(plan, step, batch, says):
    with pytest.raises(ValueError, match=facts(*says)) as error:
        step(make_state(plan), batch)
    assert len(str(error.value)) < 600


def test_keys_and_narrow_floats_are_rows_of_a_batch(plan):
    keys = jax.random.split(jax.random.key(0), ROWS)
    batch = {"x": jnp.asarray(X, jnp.bfloat16), "key": keys}

    def loss(params, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(batch["key"])
        return loss_fn(params, batch["x"] + noise)

    evaluate = fsdp.make_eval_step(plan, loss)
    params = fsdp.init_params(plan, jax.random.key(0))
    assert np.isfinite(evaluate(params, batch)["loss"])


@pytest.mark.parametrize("batches", [2, 8])
@pytest.mark.parametrize("around", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_batches_of_a_vmap_are_each_a_batch(plan, batches, around):
    """Also: a dim that the devices do not divide, which is none of the batch's."""
    grad = fsdp.value_and_grad(plan, loss_fn)
    params = fsdp.init_params(plan, jax.random.key(0))
    stack = np.stack([X + i for i in range(batches)])
    (losses, _), _ = around(jax.vmap(lambda x: grad(params, x)))(stack)
    want = [grad(params, x)[0][0] for x in stack]
    np.testing.assert_allclose(losses, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "has_aux", "says"),
    [
        (lambda p, b: (loss_fn(p, b), {"a": 1}), False, ("tuple", "has_aux=True")),
        (lambda p, b: None, False, ("NoneType",)),
        (lambda p, b: "0.5", False, ("str", "has_aux=True")),
        (loss_fn, True, ("has_aux=True", "array")),
        (lambda p, b: (loss_fn(p, b), 1, 2), True, ("has_aux=True", "tuple")),
    ],
)
def test_a_loss_that_returns_something_else_is_refused(plan, loss, has_aux, says):
    step = fsdp.make_train_step(plan, loss, TX, has_aux=has_aux)
    with pytest.raises(ValueError, match=facts(*says)):
        step(make_state(plan), X)


@pytest.mark.parametrize("name", ["has_aux", "calculate_per_token_loss"])
def test_a_word_is_no_form_of_a_loss(plan, name):
    makers = (fsdp.value_and_grad, fsdp.make_eval_step)
    for make in (*makers, lambda *args, **how: fsdp.make_train_step(*args, TX, **how)):
        with pytest.raises(ValueError, match=facts(f"{name}='no'", "True", "False")):
            make(plan, loss_fn, **{name: "no"})


def test_a_loss_of_one_argument_is_refused_before_it_is_called(plan):
    with pytest.raises(ValueError, match=facts("loss_fn", "(p)")):
        fsdp.value_and_grad(plan, lambda p: 0.0)
    with pytest.raises(ValueError, match=facts("fn", "(p)")):
        fsdp.make_forward(plan, lambda p: p)


class OfRngs(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)


@pytest.mark.parametrize(
    ("make_model", "says"),
    [
        (lambda: 1, ("()", "nnx.Rngs(key)")),
        (lambda key, width: 1, ("(key, width)", "'width'")),
        (Model, ("width", "rngs", "nnx.Rngs(key)")),
        (OfRngs, ("OfRngs", "OfRngs(rngs=nnx.Rngs(key))")),
        (Model(2, nnx.Rngs(0)), ("Model", "nnx.Rngs(key)")),
        (3, ("int",)),
    ],
)
def test_a_model_that_is_no_function_of_a_key_is_refused(make_model, says):
    with pytest.raises(ValueError, match=facts(*says)):
        fsdp.fully_shard(make_model, MESH)


def test_an_error_of_the_model_says_what_it_is_called_with():
    with pytest.raises(AttributeError) as error:
        fsdp.fully_shard(lambda rngs: Model(2, rngs), MESH)
    assert "nnx.Rngs(key)" in "".join(error.value.__notes__)


def test_a_config_in_the_place_of_units_is_refused():
    with pytest.raises(ValueError, match=facts("FSDPConfig", "config=...")):
        fsdp.fully_shard(make_weights, MESH, fsdp.FSDPConfig())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("key", [0, np.zeros(2, np.float32), "seed"])
def test_a_seed_in_the_place_of_a_key_is_refused(plan, key):
    with pytest.raises(ValueError, match=facts("jax.random.key(0)")):
        fsdp.init_params(plan, key)


def test_a_save_of_parameters_alone_is_refused(plan, tmp_path):
    with pytest.raises(ValueError, match=facts("dict", "TrainState")):
        fsdp.save(tmp_path / "run", make_state(plan).params)
