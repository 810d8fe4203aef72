"""What went wrong once, silently, and must not again."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers.compare import worst
from helpers.errors import facts

import fsdp_jax as fsdp

WIDTH = 8
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def plain(key):
    return {"w": jax.random.normal(key, (WIDTH, WIDTH))}


def square(model, x):
    return jnp.mean((x @ model["w"]) ** 2)


class Gate(eqx.Module):
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)

    def __call__(self, x):
        return jax.vmap(self.linear)(x)


def test_an_equinox_unit_is_an_instance_of_its_class():
    def loss(model, x):
        assert isinstance(model, Gate)
        return jnp.mean(model(x) ** 2)

    plan = fsdp.fully_shard(Gate, fsdp.make_mesh(), [Gate])
    fsdp.value_and_grad(plan, loss)(fsdp.init_params(plan, jax.random.key(0)), X)


class Inner(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnp.tanh(linen.Dense(WIDTH)(x))


class Outer(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(WIDTH)(Inner(name="inner")(x))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return Outer(name="outer")(x)


def test_linen_units_within_units_compute_the_same():
    module = Linen()
    units = ["params.outer", "params.outer.inner"]
    plan = fsdp.fully_shard(
        lambda key: module.init(key, X[:1]), fsdp.make_mesh(), units
    )

    def loss(variables, x):
        return jnp.mean(module.apply(variables, x) ** 2)

    params = fsdp.init_params(plan, jax.random.key(0))
    _, grads = fsdp.value_and_grad(plan, loss)(params, X)
    want = jax.grad(loss)(jax.device_get(params), X)
    error = worst(grads, want)
    assert error < 1e-5


def test_linen_statistics_are_not_trained():
    norm = linen.BatchNorm(use_running_average=False)
    plan = fsdp.fully_shard(lambda key: norm.init(key, X), fsdp.make_mesh())
    assert [param.name for param in plan.param_plans] == ["params.bias", "params.scale"]
    assert set(plan.model_state["batch_stats"]) == {"mean", "var"}


def test_moments_keep_their_dtype():
    policy = fsdp.MixedPrecisionPolicy(
        main_params_dtype=jnp.bfloat16, main_grads_dtype=jnp.float32
    )
    plan = fsdp.fully_shard(
        plain, fsdp.make_mesh(), config=fsdp.FSDPConfig(mp_policy=policy)
    )
    tx = optax.adamw(1e-2)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    before = jax.tree.map(lambda x: x.dtype, state.opt_state)
    state, _ = fsdp.make_train_step(plan, square, tx)(state, X)
    assert jax.tree.map(lambda x: x.dtype, state.opt_state) == before


def test_complex_parameters_stay_complex():
    def make(key):
        return {"w": jnp.full((WIDTH,), 1 + 2j, jnp.complex64)}

    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    plan = fsdp.fully_shard(
        make, fsdp.make_mesh(), config=fsdp.FSDPConfig(mp_policy=policy)
    )
    evaluate = fsdp.make_eval_step(plan, lambda m, x: jnp.mean(abs(m["w"]) ** 2))
    params = fsdp.init_params(plan, jax.random.key(0))
    np.testing.assert_allclose(evaluate(params, X)["loss"], 5, rtol=1e-6)


def test_a_parameter_of_integers_is_refused():
    class Table(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(WIDTH))
            self.ids = nnx.Param(jnp.arange(WIDTH))

    with pytest.raises(ValueError, match=facts("nnx.Param", "ids")):
        fsdp.fully_shard(lambda key: Table(), fsdp.make_mesh())


def test_the_state_of_a_bare_array_is_split_too():
    def make(key):
        return jax.random.normal(key, (WIDTH, WIDTH))

    plan = fsdp.fully_shard(make, fsdp.make_mesh())
    moments = fsdp.abstract_state(plan, optax.adamw(1e-2)).opt_state[0].mu
    assert moments.sharding == plan.params.sharding


def test_a_batch_is_the_callers_to_overwrite():
    plan = fsdp.fully_shard(plain, fsdp.make_mesh())
    params = fsdp.init_params(plan, jax.random.key(0))
    compute = fsdp.value_and_grad(plan, square)
    want, _ = compute(params, X)
    for _ in range(10):
        buffer = X.copy()
        got, _ = compute(params, buffer)
        buffer[:] = 0
        assert got[0] == want[0]


def test_narrow_integers_are_counted_wide():
    def loss(model, x):
        return square(model, x), {"count": jnp.uint8(200)}

    plan = fsdp.fully_shard(plain, fsdp.make_mesh())
    evaluate = fsdp.make_eval_step(plan, loss, has_aux=True)
    params = fsdp.init_params(plan, jax.random.key(0))
    assert evaluate(params, X)["aux"]["count"] == 8 * 200


def test_an_option_that_would_do_nothing_is_refused():
    policy = jax.checkpoint_policies.nothing_saveable
    with pytest.raises(
        ValueError, match=facts("FSDPConfig(remat_policy=...)", "units=[LayerClass]")
    ):
        fsdp.fully_shard(
            plain, fsdp.make_mesh(), config=fsdp.FSDPConfig(remat_policy=policy)
        )
    for wrong in (0, "1"):
        with pytest.raises(ValueError, match=facts(f"num_dims={wrong!r}", "1")):
            fsdp.Stacked("layers", num_dims=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=facts("num_microbatches=0", "1")):
        plan = fsdp.fully_shard(plain, fsdp.make_mesh())
        fsdp.make_train_step(plan, square, optax.sgd(0.1), num_microbatches=0)


@pytest.mark.parametrize("use", [lambda w: w * 2, lambda w: -w, lambda w: X @ w, len])
def test_arithmetic_with_a_units_weight_outside_of_it_is_explained(use):
    plan = fsdp.fully_shard(plain, fsdp.make_mesh(), ["w"])
    params = fsdp.init_params(plan, jax.random.key(0))
    compute = fsdp.value_and_grad(plan, lambda m, x: jnp.sum(use(m["w"])))
    with pytest.raises(ValueError, match=facts("'w'", "fsdp.unit")):
        compute(params, X)


def test_a_marked_function_gathers_the_weights_of_its_first_argument():
    def make(key):
        return {"a": plain(key)["w"], "b": plain(key)["w"]}

    def add(weights, x):
        return jnp.mean((x @ weights["a"] + x @ weights["b"]) ** 2)

    def apart(m, x):
        return fsdp.unit(lambda a, b: add({"a": a, "b": b}, x))(m["a"], m["b"])

    plan = fsdp.fully_shard(make, fsdp.make_mesh(), ["a", "b"])
    params = fsdp.init_params(plan, jax.random.key(0))
    got = fsdp.make_eval_step(plan, fsdp.unit(add))(params, X)["loss"]
    np.testing.assert_allclose(got, add(fsdp.unshard(params), X), rtol=1e-5)
    with pytest.raises(ValueError, match=facts("'b'", "fsdp.unit")):
        fsdp.make_eval_step(plan, apart)(params, X)


def test_the_models_other_arrays_can_be_given():
    def make(key):
        return plain(key) | {"table": jnp.zeros(3, jnp.int32)}

    plan, tx = fsdp.fully_shard(make, fsdp.make_mesh()), optax.sgd(0.1)
    given = {"w": None, "table": jax.device_put(np.arange(3, dtype=np.int32))}
    given = jax.tree.map(
        lambda x, m: jax.device_put(x, m.sharding), given, plan.model_state
    )
    params = fsdp.init_params(plan, jax.random.key(0))
    state = fsdp.init_state(plan, tx, params, model_state=given)
    assert state.model_state["table"].tolist() == [0, 1, 2]


def test_arguments_in_the_place_of_others_are_named(tmp_path):
    plan = fsdp.fully_shard(lambda key: {"w": jnp.ones((8, 8))}, fsdp.make_mesh(), [])
    params, tx = fsdp.init_params(plan, jax.random.key(0)), optax.adam(1e-2)
    with pytest.raises(ValueError, match=facts("dict", "optax.adamw(1e-3)")):
        fsdp.init_state(plan, params, tx)
    with pytest.raises(ValueError, match=facts("function", "optax.adamw(1e-3)")):
        fsdp.make_train_step(plan, lambda p, x: (x @ p["w"]).sum(), optax.adam)
    state = fsdp.init_state(plan, tx, params)
    step = fsdp.make_train_step(plan, lambda p, x: (x @ p["w"]).sum(), tx)
    with pytest.raises(ValueError, match=facts("step(state, batch)", "TrainState")):
        step(np.ones((8, 8)), state)
    with pytest.raises(ValueError, match=facts("NoneType")):
        step(state, None)
    with pytest.raises(ValueError, match=facts("TrainState")):
        fsdp.Checkpointer(state)
    with pytest.raises(ValueError, match=facts("TrainState")):
        fsdp.save(state, tmp_path)


ROPE = jnp.exp(1j * jnp.arange(WIDTH // 2))[None]


def rotated(w, x, turn):
    h = x @ w
    turned = jax.lax.complex(h[..., ::2], h[..., 1::2]) * turn
    return x + jnp.sin(jnp.concatenate([turned.real, turned.imag], -1)), turn * turn


def spectral(w, x):
    return x + jnp.fft.irfft(jnp.sin(jnp.fft.rfft(x) * w[None]), n=WIDTH)


def through_ropes(run, layers, x):
    turn = ROPE
    for w in layers:
        x, turn = run(w, x, turn)
    return x


def through_spectra(run, layers, x):
    for w in layers:
        x = run(w, x)
    return x


POLICIES = jax.checkpoint_policies
SAVING = {
    "all": {},
    "all, at entry": {"prefetch": 0},
    "everything": {"remat_policy": POLICIES.everything_saveable},
    "dots": {"remat_policy": POLICIES.dots_saveable, "prefetch": 0},
}
COMPLEX = {
    "a rope": (rotated, through_ropes, (WIDTH, WIDTH), jnp.float32),
    "weights": (spectral, through_spectra, (WIDTH // 2 + 1,), jnp.complex64),
}


@pytest.mark.parametrize("config", SAVING)
@pytest.mark.parametrize("case", COMPLEX)
def test_complex_numbers_in_units_have_the_gradients_of_one_device(case, config):
    layer, through, shape, dtype = COMPLEX[case]

    def make(key):
        return {"layers": [jax.random.normal(key, shape, dtype) / 4 for _ in range(3)]}

    def loss(run):
        return lambda p, x: jnp.mean(through(run, p["layers"], x) ** 2)

    config = fsdp.FSDPConfig(**SAVING[config])
    plan = fsdp.fully_shard(make, fsdp.make_mesh(), ["layers.*"], config)
    params = fsdp.init_params(plan, jax.random.key(0))
    (value, _), grads = fsdp.value_and_grad(plan, loss(fsdp.unit(layer)))(params, X)
    alone = jax.value_and_grad(loss(layer))(make(jax.random.key(0)), X)
    np.testing.assert_allclose(value, alone[0], rtol=1e-5)  # order of sums
    for ours, theirs in zip(*map(jax.tree.leaves, (grads, alone[1])), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda plan, params, x: fsdp.make_eval_step(plan, square),
        lambda plan, params, x: fsdp.make_forward(plan, square),
        lambda plan, params, x: fsdp.value_and_grad(plan, square),
        lambda plan, params, x: fsdp.trainable(plan, params),
        lambda plan, params, x: fsdp.reshard(params, plan),
        lambda plan, params, x: fsdp.audit.audit_loss(plan, square, x),
        lambda plan, params, x: fsdp.audit_step(plan, ""),
    ],
)
def test_parameters_in_the_place_of_a_plan_are_named(function):
    plan = fsdp.fully_shard(plain, fsdp.make_mesh(), [])
    with pytest.raises(ValueError, match=facts("plan", "dict", "fully_shard")):
        function(plan.params, fsdp.init_params(plan, jax.random.key(0)), X)


def test_an_argument_of_a_loss_that_nobody_gives_is_named():
    plan = fsdp.fully_shard(plain, fsdp.make_mesh(), [])
    with pytest.raises(ValueError, match=facts("seed", "key")):
        fsdp.value_and_grad(plan, lambda model, batch, seed: 0.0)
    fsdp.value_and_grad(plan, lambda model, batch, seed=None, *, key: 0.0)
