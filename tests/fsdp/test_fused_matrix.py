"""Muon of a fused kernel is that of its parts, on any mesh and through a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves
from fsdp_jax.optim import FusedMatrix
from fsdp_jax.sharding._padded import pack

SHAPES = {
    "qkv": (3, 16, 4, 6),  # layers, embed, heads, head_dim
    "grouped": (3, 16, 24),
    "other": (3, 16, 24),
    "bias": (3, 24),
}
FUSED = {
    "layers.qkv": FusedMatrix((12, 6, 6)),
    "layers.grouped": FusedMatrix((8, 2, 2), num_groups=2),
    "layers.other": 1,
}
# Newton-Schulz multiplies rounding in float32 by some hundreds.
TOLERANCE = 1e-4


def make_weights(key):
    return {"layers": {name: jnp.ones(shape) for name, shape in SHAPES.items()}}


def gradient(name, step):
    random = np.random.default_rng(step)
    return random.normal(size=SHAPES[name]).astype(np.float32)


def muon():
    return optax.contrib.muon(
        1e-2,
        muon_weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda _: optax.contrib.MuonDimensionNumbers((1,), (2,)), tree
        ),
    )


def tx_of(plan, **options):
    return fsdp.optim.layer_wise(plan, muon(), optax.adam(1e-2), FUSED, **options)


def plan_of(num_devices, **config):
    mesh = fsdp.make_mesh(devices=jax.devices()[:num_devices], **config)
    return fsdp.fully_shard(make_weights, mesh, [fsdp.Stacked("layers")])


def updates_of(plan, tx, state, number):
    """Updates of one step by name, and the next state."""
    grads = {"layers": {name: gradient(name, number) for name in SHAPES}}
    params = fsdp.sharding.unpack(fsdp.init_params(plan, jax.random.key(0)))
    updates, state = jax.jit(tx.update)(grads, state, params)
    return {name: np.asarray(x) for name, x in named_leaves(updates)}, state


def by_hand(steps):
    """Updates of the last step, each part a stack of its own on one device."""

    def parts(number):
        qkv = gradient("qkv", number).reshape(3, 16, 24)
        grouped = gradient("grouped", number).reshape(3, 16, 2, 12)
        cut = np.split(grouped, [8, 10], axis=-1)
        return {
            **dict(zip("qkv", np.split(qkv, [12, 18], axis=-1), strict=True)),
            **{str(i): part.reshape(3, 16, -1) for i, part in enumerate(cut)},
            "other": gradient("other", number),
        }

    tx, found = muon(), None
    state = tx.init(parts(0))
    for number in range(steps):
        ones = jax.tree.map(jnp.ones_like, parts(number))
        found, state = tx.update(parts(number), state, ones)
    grouped = [np.asarray(found[str(i)]).reshape(3, 16, 2, -1) for i in range(3)]
    return {
        "layers.qkv": np.concatenate([found[x] for x in "qkv"], -1).reshape(
            3, 16, 4, 6
        ),
        "layers.grouped": np.concatenate(grouped, -1).reshape(3, 16, 24),
        "layers.other": np.asarray(found["other"]),
    }


def assert_near(found, expected):
    for name, want in expected.items():
        assert abs(found[name] - want).max() <= TOLERANCE * abs(want).max(), name


@pytest.mark.parametrize("options", [{}, {"per_matrix": True}], ids=str)
def test_updates_are_those_of_the_parts_and_go_on_elsewhere(tmp_path, options):
    plan = plan_of(4)
    tx = tx_of(plan, **options)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    found, opt_state = updates_of(plan, tx, fsdp.sharding.unpack(state.opt_state), 0)
    assert_near(found, by_hand(1))
    again, _ = updates_of(plan, tx, opt_state, 1)
    assert_near(again, by_hand(2))
    packed = pack(opt_state, fsdp.abstract_state(plan, tx).opt_state)
    fsdp.save(tmp_path, fsdp.TrainState(**{**vars(state), "opt_state": packed}))
    other = plan_of(2)
    loaded = fsdp.load(tmp_path, fsdp.abstract_state(other, tx_of(other)))
    opt_state = fsdp.sharding.unpack(loaded.opt_state)
    elsewhere, _ = updates_of(other, tx_of(other), opt_state, 1)
    assert_near(elsewhere, by_hand(2))


def test_a_fused_kernel_as_one_matrix_has_other_updates():
    plan = plan_of(1)
    tx = fsdp.optim.layer_wise(plan, muon(), optax.adam(1e-2), dict.fromkeys(FUSED, 1))
    state = tx.init(fsdp.init_params(plan, jax.random.key(0)))
    found, _ = updates_of(plan, tx, state, 0)
    with pytest.raises(AssertionError, match=facts("layers.qkv")):
        assert_near(found, by_hand(1))


def test_parts_that_are_not_all_columns_are_refused():
    plan = plan_of(1)
    wrong = {"layers.qkv": FusedMatrix((12, 6)), "layers.grouped": FusedMatrix((8,))}
    with pytest.raises(ValueError, match=facts("layers.qkv", "18", "layers.grouped")):
        fsdp.optim.layer_wise(plan, muon(), optax.adam(1e-2), wrong)
