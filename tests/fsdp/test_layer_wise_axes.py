"""Whole matrices for Muon out of weights that tp, ep and pp split, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves
from fsdp_jax.sharding._padded import pack
from fsdp_jax.training._trainable import seen_by_optimizer, trainable

LAYERS, EXPERTS = 3, 4
SHAPES = {
    "up": (LAYERS, 16, 8),
    "down": (LAYERS, 8, 16),
    "odd": (LAYERS, 13, 7),
    "narrow": (LAYERS, 3, 16),
    "experts": (LAYERS, EXPERTS, 16, 8),
    "bias": (LAYERS, 16),
}
MATRICES = ("layers.up", "layers.down", "layers.odd", "layers.narrow")
MATRICES += ("layers.experts",)
# Products in float32, summed in another order.
RTOL = 1e-5


def tree_of(draw):
    return {"layers": {name: draw(shape) for name, shape in SHAPES.items()}}


def make_weights(key):
    return tree_of(jnp.ones)


def gradients():
    random = np.random.default_rng(0)
    return tree_of(lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32))


def whole_matrix():
    """What only a whole matrix gives, as Muon has it: of momentum M, M M^T M."""
    momentum = optax.trace(0.9)

    def update(updates, state, params=None):
        updates, state = momentum.update(updates, state)
        size = jax.tree.map(lambda m: (m**2).sum((-2, -1), keepdims=True), updates)
        cubes = jax.tree.map(lambda m: m @ m.swapaxes(-2, -1) @ m, updates)
        return jax.tree.map(lambda c, n: c / (1 + n), cubes, size), state

    return optax.GradientTransformation(momentum.init, update)


def layer_wise(plan, **options):
    parts = whole_matrix(), optax.adam(1e-2)
    return fsdp.optim.layer_wise(plan, *parts, MATRICES, **options)


def plain(plan):
    names = {name: "adam" if name == "bias" else "whole" for name in SHAPES}
    parts = {"whole": whole_matrix(), "adam": optax.adam(1e-2)}
    return optax.multi_transform(parts, {"layers": names})


def plan_of(num_devices, config=None, **mesh):
    return fsdp.fully_shard(
        make_weights,
        fsdp.make_mesh(devices=jax.devices()[:num_devices], **mesh),
        [fsdp.Stacked("layers")],
        fsdp.FSDPConfig(**config or {}, expert_parallel={"layers.experts": 0}),
    )


def step_of(plan, tx):
    """From a state to its updates by name and the next state."""
    like = fsdp.abstract_state(plan, tx).opt_state

    @jax.jit
    def update(params, opt_state, grads):
        given = trainable(plan, grads), fsdp.sharding.unpack(opt_state)
        updates, new = tx.update(
            *given, seen_by_optimizer(plan, fsdp.sharding.unpack(params))
        )
        return updates, pack(new, like)

    def step(state, scale):
        grads = jax.tree.map(lambda x: scale * x**2 - 1, gradients())
        updates, new = update(state.params, state.opt_state, grads)
        state = fsdp.TrainState(**{**vars(state), "opt_state": new})
        return {name: np.asarray(x) for name, x in named_leaves(updates)}, state

    return step


def started(plan, tx):
    return fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))


@pytest.fixture(scope="module")
def one_device():
    plan = plan_of(1)
    step = step_of(plan, plain(plan))
    _, state = step(started(plan, plain(plan)), 1.0)
    return step(state, 2.0)[0]


# Data axes and tp share the one dim of narrow that either divides.
TP = {"tensor_parallel": {"layers.up": 1, "layers.down": 0, "layers.narrow": 1}}
CASES = {
    # In stages of two layers, of which the last is zeros.
    "pp, ep, tp": (8, TP, {"pp": 2, "ep": 2, "tp": 2}),
    "ep, tp, data": (8, TP, {"ep": 2, "tp": 2}),
    # Of which each device then stores unsharded ones.
    "experts split over data": (8, {}, {"dp_outer": 2}),
}


@pytest.mark.parametrize(
    "case, per_matrix",
    [*((case, False) for case in CASES), ("pp, ep, tp", True), ("ep, tp, data", True)],
)
def test_updates_are_those_of_one_device_and_go_on_elsewhere(
    case, per_matrix, one_device, tmp_path
):
    num_devices, config, mesh = CASES[case]
    plan = plan_of(num_devices, config, **mesh)
    tx = layer_wise(plan, per_matrix=per_matrix)
    step = step_of(plan, tx)
    _, state = step(started(plan, tx), 1.0)
    fsdp.save(tmp_path, state)
    check(step(state, 2.0)[0], one_device)
    other = plan_of(2)
    like = fsdp.abstract_state(other, layer_wise(other))
    loaded = fsdp.load(tmp_path, like)
    check(step_of(other, layer_wise(other))(loaded, 2.0)[0], one_device)


def check(got, want):
    assert set(got) == set(want)
    for name, value in got.items():
        scale = RTOL * abs(want[name]).max()
        np.testing.assert_allclose(value, want[name], atol=scale, err_msg=name)


KERNELS = {
    "q": (LAYERS, 16, 4, 6),  # [embed, heads, head_dim]
    "o": (LAYERS, 4, 6, 16),
    "bias": (LAYERS, 16),
}


def kernels_of(draw):
    return {"layers": {name: draw(shape) for name, shape in KERNELS.items()}}


def test_kernels_of_heads_are_matrices_and_go_on_elsewhere(tmp_path):
    random = np.random.default_rng(0)
    grads = kernels_of(lambda s: jnp.asarray(random.normal(size=s), jnp.float32))
    rows = {"layers.q": 1, "layers.o": 2}
    tp = {"layers.q": 1, "layers.o": 0}

    def planned(num_devices, **mesh):
        return fsdp.fully_shard(
            lambda key: kernels_of(jnp.ones),
            fsdp.make_mesh(devices=jax.devices()[:num_devices], **mesh),
            [fsdp.Stacked("layers")],
            fsdp.FSDPConfig(tensor_parallel=tp if mesh else {}),
        )

    def updates(plan, state=None):
        tx = fsdp.optim.layer_wise(plan, whole_matrix(), optax.adam(1e-2), rows)
        state = started(plan, tx) if state is None else fsdp.load(state, like(plan, tx))
        like_state = fsdp.abstract_state(plan, tx).opt_state
        given = trainable(plan, grads), fsdp.sharding.unpack(state.opt_state)
        found, new = jax.jit(tx.update)(*given)
        state = fsdp.TrainState(**{**vars(state), "opt_state": pack(new, like_state)})
        return {n: np.asarray(x) for n, x in named_leaves(found)}, state

    def like(plan, tx):
        return fsdp.abstract_state(plan, tx)

    got, state = updates(planned(8, tp=2))
    fsdp.save(tmp_path, state)
    again, _ = updates(planned(2), tmp_path)
    momentum = {name: np.zeros(shape) for name, shape in KERNELS.items()}
    for found in (got, again):
        for name in ("q", "o"):
            grad = np.asarray(grads["layers"][name], np.float64)
            momentum[name] = 0.9 * momentum[name] + grad
            m = momentum[name].reshape(LAYERS, *{"q": (16, 24), "o": (24, 16)}[name])
            size = (m**2).sum((1, 2), keepdims=True)
            want = m @ m.swapaxes(1, 2) @ m / (1 + size)
            scale = RTOL * abs(want).max()
            ours = found[f"layers.{name}"].reshape(want.shape)
            np.testing.assert_allclose(ours, want, atol=scale, err_msg=name)


def test_kernels_without_a_number_of_rows_are_refused():
    plan = fsdp.fully_shard(
        lambda key: kernels_of(jnp.ones), fsdp.make_mesh(), [fsdp.Stacked("layers")]
    )
    for matrices in (("layers.q",), {"layers.q": 3}, {"layers.q": 0}):
        with pytest.raises(ValueError, match=facts("'layers.q'", "(3, 16, 4, 6)")):
            fsdp.optim.layer_wise(plan, whole_matrix(), optax.adam(1e-2), matrices)


def test_a_vector_for_each_expert_is_no_matrix():
    plan = fsdp.fully_shard(
        lambda key: {"gain": jnp.ones((4, 8))},
        fsdp.make_mesh(ep=2),
        config=fsdp.FSDPConfig(expert_parallel={"gain": 0}),
    )
    with pytest.raises(ValueError, match=facts("'gain'", "(4, 8)")):
        fsdp.optim.layer_wise(plan, whole_matrix(), optax.adam(1e-2), ("gain",))
