"""Any optax optimizer trains as on one device, or is refused before the first step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers.compare import worst
from helpers.errors import facts

import fsdp_jax as fsdp

# Three steps of two devices and of one differ by rounding in float64; where optax keeps
# a number of its state in float32, that number is the same.
RTOL = 1e-9
X = np.random.default_rng(0).normal(size=(8, 4))
MESH = fsdp.make_mesh(devices=jax.devices()[:2])


def make(key):
    return {"w": jax.random.normal(key, (4, 6)) / 2, "b": jnp.ones((6,))}


def loss_fn(p, x):
    return jnp.mean(jnp.tanh(x @ p["w"] + p["b"][None]) ** 2)


def plan_of(**config):
    return fsdp.fully_shard(make, MESH, config=fsdp.FSDPConfig(**config))


def plain_steps(name, tx, params, num_steps):
    """The same steps by jax and optax alone."""
    extra = NEED_LOSS & set(name.split())

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, X)
        updates, state = tx.update(
            grads, state, params, **({"value": loss} if extra else {})
        )
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(num_steps):
        params, state = step(params, state)
    return params


def plateau():
    reduce = optax.contrib.reduce_on_plateau(factor=0.5, patience=0, rtol=0.5)
    return optax.chain(optax.sgd(0.1), reduce)


NEED_LOSS = {"reduce_on_plateau", "polyak_sgd", "momo"}
SERVED = {
    "reduce_on_plateau": plateau,
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=0.1),
    "momo": lambda: optax.contrib.momo(0.1),
    "lbfgs without a line search": lambda: optax.lbfgs(0.01, linesearch=None),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "prodigy": lambda: optax.contrib.prodigy(0.1),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
}


@pytest.mark.parametrize("name", SERVED)
def test_an_optimizer_that_looks_at_the_loss_or_the_past_trains_as_on_one_device(name):
    # float64, since L-BFGS divides by differences of gradients that are nearly alike.
    with jax.enable_x64(True):
        plan, tx = plan_of(), SERVED[name]()
        params = fsdp.init_params(plan, jax.random.key(0))
        want = plain_steps(name, tx, jax.tree.map(np.array, params), 3)
        state = fsdp.init_state(plan, tx, params)
        step = fsdp.make_train_step(plan, loss_fn, tx)
        for _ in range(3):
            state, _ = step(state, X)
        assert worst(fsdp.unshard(state.params), want) < RTOL


def shape_changing():
    def update(updates, state, params=None):
        return updates, {"seen": jnp.concatenate([state["seen"], jnp.ones(1)])}

    return optax.GradientTransformation(lambda p: {"seen": jnp.zeros(1)}, update)


def extra_updates():
    return optax.GradientTransformation(
        lambda p: optax.EmptyState(), lambda u, s, p=None: ({**u, "more": u["w"]}, s)
    )


REFUSED = {
    "lbfgs": (optax.lbfgs, ("value_fn", "linesearch=None")),
    "lookahead": (
        lambda: optax.lookahead(optax.sgd(0.1), 5, 0.5),
        ("fast", "LookaheadParams"),
    ),
    "sophia": (lambda: optax.contrib.sophia(0.1), ("obj_fn", "value_and_grad")),
    "backtracking": (
        lambda: optax.scale_by_backtracking_linesearch(5),
        ("update", "TypeError"),
    ),
    "multi_steps": (
        lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        ("MultiSteps", "num_microbatches=k"),
    ),
    "state that grows": (shape_changing, ("seen", "(2,)", "(1,)")),
    "other updates": (extra_updates, ("more", "unexpected", "(4, 6)")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_a_step_cannot_serve_is_refused_before_the_first_step(name):
    tx, says = REFUSED[name]
    with pytest.raises(ValueError, match=facts(*says)):
        fsdp.make_train_step(plan_of(), loss_fn, tx())


def test_an_optimizer_sees_the_loss_where_its_state_is_stored_on_the_host():
    offload = fsdp.OffloadPolicy(optimizer=True, min_elements=1)
    plan, tx = plan_of(offload=offload), plateau()
    step = fsdp.make_train_step(plan, loss_fn, tx)
    step.lower(fsdp.abstract_state(plan, tx), X)


def test_one_vector_of_all_parameters_is_split_though_no_devices_divide_it():
    def make(key):
        return {"w": jax.random.normal(key, (61, 83)), "b": jnp.zeros(5)}

    def loss(params, batch):
        return jnp.mean((batch @ params["w"] + params["b"].sum()) ** 2)

    tx, batch = optax.flatten(optax.adam(0.1)), jnp.ones((8, 61))

    def trained(num_devices):
        mesh = fsdp.make_mesh(devices=jax.devices()[:num_devices])
        plan = fsdp.fully_shard(make, mesh)
        state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
        step = fsdp.make_train_step(plan, loss, tx)
        for _ in range(3):
            state, _ = step(state, batch)
        return state

    split, one = trained(8), trained(1)
    moments = [split.opt_state[0].mu.value, split.opt_state[0].nu.value]
    assert {x.addressable_shards[0].data.shape for x in moments} == {(634,)}
    # Rows of a batch are summed in another order.
    for name, want in fsdp.unshard(one.params).items():
        np.testing.assert_allclose(
            fsdp.unshard(split.params)[name], want, rtol=1e-5, atol=1e-7, err_msg=name
        )
