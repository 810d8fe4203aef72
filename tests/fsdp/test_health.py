"""Gradients that are not finite are named, on every host alike, or skipped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compare import host
from helpers.errors import facts
from helpers.hlo import collectives

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves

TX = optax.adamw(1e-2)


def make_weights(key):
    return {
        "layers": {"w": 0.3 * jax.random.normal(key, (3, 16, 16))},
        "bad": jnp.ones(16),
        "odd": jnp.ones(13),
        "fixed": jnp.ones(16),
    }


def layer(w, x):
    return x + jnp.tanh(x @ w["w"]), None


def loss_fn(weights, batch):
    x, _ = fsdp.scan(layer, weights["layers"], batch["x"])
    # Finite, with an infinite gradient, where `poison` is zero.
    root = jnp.sqrt(jnp.abs(weights["bad"][None] * batch["poison"]))
    return jnp.mean((x * root * weights["fixed"][None]) ** 2) + weights["odd"].sum()


def batch(poisoned_row=None, value=0.0):
    random = np.random.default_rng(0)
    poison = np.ones((16, 1), np.float32)
    if poisoned_row is not None:
        poison[poisoned_row] = value
    return {"x": random.normal(size=(16, 16)).astype("f"), "poison": poison}


@pytest.fixture(scope="module", params=[{}, {"dp_outer": 2}], ids=["FSDP", "HSDP"])
def plan(request):
    return fsdp.fully_shard(
        make_weights,
        fsdp.make_mesh(**request.param),
        [fsdp.Stacked("layers")],
        fsdp.FSDPConfig(frozen=("fixed",)),
    )


def start(plan):
    return fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))


@pytest.mark.parametrize("row", [0, 15])
def test_the_error_names_the_parameters_and_the_step(plan, row):
    step = fsdp.make_train_step(plan, loss_fn, TX, on_nonfinite="raise")
    state, _ = step(start(plan), batch())
    # One row of one rank; in which parameters it shows is for backward to say.
    with pytest.raises(FloatingPointError) as error:
        step(state, batch(row))
    assert str(error.value).startswith("Step 2: 1 of 3 gradients are not finite: bad.")


def test_a_nan_in_the_data_shows_in_all_that_it_reached(plan):
    step = fsdp.make_train_step(plan, loss_fn, TX, on_nonfinite="raise")
    with pytest.raises(
        FloatingPointError,
        match=facts("2 of 3", "bad, layers.w", "on_nonfinite='skip'"),
    ):
        step(start(plan), batch(3, np.nan))


def test_healthy_steps_pass(plan):
    step = fsdp.make_train_step(plan, loss_fn, TX, on_nonfinite="raise")
    state = start(plan)
    for _ in range(3):
        state, metrics = step(state, batch())
    assert np.isfinite(metrics["grad_peaks"]).all()


def test_peaks_are_those_of_the_unsharded_gradients(plan):
    step = fsdp.make_train_step(plan, loss_fn, TX, report_grad_peaks=True)
    state = start(plan)
    _, grads = fsdp.value_and_grad(plan, loss_fn)(state.params, batch())
    want = {name: np.abs(leaf).max() for name, leaf in named_leaves(host(grads))}
    _, metrics = step(state, batch())
    names = [param.name for param in plan.param_plans if not param.is_frozen]
    got = dict(zip(names, np.asarray(metrics["grad_peaks"]), strict=True))
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6, err_msg=name)


def test_the_report_has_the_largest_gradients_first(plan):
    table = fsdp.training.largest_grads(plan, np.array([2.0, np.inf, 0.5]), num=2)
    header, first, second = table.splitlines()
    assert header.split() == ["parameter", "largest", "of", "the", "median"]
    assert first.split() == ["layers.w", "not", "finite"]
    assert second.split() == ["bad", "2.000e+00", "1.0", "x"]


def test_flags_are_one_vector_in_one_reduction(plan):
    found = {}
    for asked in (False, True):
        step = fsdp.make_train_step(plan, loss_fn, TX, report_grad_peaks=asked)
        lowered = step.lower(fsdp.abstract_state(plan, TX), batch())
        text = lowered.compile().as_text()
        found[asked] = sorted(
            (c.op, c.shape) for c in collectives(text) if c.op == "all-reduce"
        )
    extra = list(found[True])
    for each in found[False]:
        extra.remove(each)
    assert extra == [("all-reduce", (3,))]


def test_a_step_that_is_skipped_changes_nothing_but_its_count(plan):
    step = fsdp.make_train_step(plan, loss_fn, TX, on_nonfinite="skip")
    state, _ = step(start(plan), batch())
    before = host((state.params, state.opt_state))
    state, metrics = step(state, batch(3, np.nan))
    after = host((state.params, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert (int(state.step), int(state.num_skipped)) == (2, 1)
    assert not np.isfinite(metrics["grad_peaks"]).all()
    state, _ = step(state, batch())
    changed = jax.tree.map(lambda a, b: (a != b).any(), after[0], host(state.params))
    assert changed["layers"]["w"]
    assert (int(state.step), int(state.num_skipped)) == (3, 1)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.out = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x))


def test_a_skipped_step_does_not_spoil_statistics():
    plan = fsdp.fully_shard(lambda key: Normed(nnx.Rngs(key)), fsdp.make_mesh())
    step = fsdp.make_train_step(
        plan,
        lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        TX,
        on_nonfinite="skip",
    )
    state, _ = step(start(plan), {"x": batch()["x"]})
    before = host(state.model_state)
    bad = np.full((16, 16), np.nan, np.float32)
    state, _ = step(state, {"x": bad})
    jax.tree.map(np.testing.assert_array_equal, before, host(state.model_state))
    assert int(state.num_skipped) == 1


def test_an_unknown_answer_to_such_gradients_is_refused(plan):
    with pytest.raises(
        ValueError, match=facts("on_nonfinite='ignore'", "'raise'", "'skip'")
    ):
        fsdp.make_train_step(plan, loss_fn, TX, on_nonfinite="ignore")


def test_without_asking_there_is_no_report(plan):
    _, metrics = fsdp.make_train_step(plan, loss_fn, TX)(start(plan), batch())
    assert metrics.keys() == {"loss", "grad_norm"}
