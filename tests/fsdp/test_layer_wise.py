"""Muon with whole matrices on their owners equals Muon on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host, worst
from helpers.hlo import collectives

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves

LAYERS = 3


def make_weights(key):
    up, down, odd = jax.random.split(key, 3)
    return {
        "layers": {
            "up": 0.3 * jax.random.normal(up, (LAYERS, 16, 64)),
            "down": 0.3 * jax.random.normal(down, (LAYERS, 64, 16)),
            "gate": 0.3 * jax.random.normal(down, (LAYERS, 16, 64)),
            "odd": 0.3 * jax.random.normal(odd, (LAYERS, 13, 17)),
            "bias": jnp.zeros((LAYERS, 64)),
        },
        "head": 0.3 * jax.random.normal(key, (16, 16)),
    }


def layer(w, x):
    hidden = jnp.tanh(x @ w["up"] + w["bias"][None]) * (x @ w["gate"])
    x = x + hidden @ w["down"]
    return x.at[:, :13].add((x[:, :13] @ w["odd"])[:, :13]), None


def loss_fn(weights, batch):
    x, _ = fsdp.scan(layer, weights["layers"], batch["x"])
    return jnp.mean((x @ weights["head"] - batch["y"]) ** 2)


def batch():
    random = np.random.default_rng(0)
    return {name: random.normal(size=(24, 16)) for name in "xy"}


MATRICES = ("layers.up", "layers.down", "layers.gate", "layers.odd")
STACKED = optax.contrib.MuonDimensionNumbers((1,), (2,))


def muon():
    """Muon for stacks of matrices, whatever tree they come in."""
    return optax.contrib.muon(
        1e-2,
        muon_weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda leaf: STACKED, tree
        ),
    )


def plain_tx():
    labels = {
        "layers": {
            name: "muon" if f"layers.{name}" in MATRICES else "adam"
            for name in ("up", "down", "gate", "odd", "bias")
        },
        "head": "adam",
    }
    return optax.multi_transform({"muon": muon(), "adam": optax.adam(1e-2)}, labels)


def layer_wise_tx(plan, **options):
    return fsdp.optim.layer_wise(plan, muon(), optax.adam(1e-2), MATRICES, **options)


def plan_of(mesh, **config):
    units = [fsdp.Stacked("layers")]
    return fsdp.fully_shard(make_weights, mesh, units, fsdp.FSDPConfig(**config))


def trained(plan, tx):
    step = fsdp.make_train_step(plan, loss_fn, tx)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    for _ in range(3):
        state, _ = step(state, batch())
    return state


@pytest.mark.parametrize(
    "num_devices, axes, config",
    [
        (8, {}, {}),
        # Four: a reduce-scatter and an all-to-all at once wait for threads that jax
        # 0.10's eight simulated devices do not have.
        (4, {"dp_outer": 2}, {"outer_dp_sharding_strategy": 1}),
        (8, {}, {"zero_dp_strategy": 0}),
    ],
    ids=["ZeRO-3", "HFSDP", "DDP"],
)
def test_updates_are_those_of_one_device(num_devices, axes, config):
    with jax.enable_x64(True):
        mesh = fsdp.make_mesh(**axes, devices=jax.devices()[:num_devices])
        plan = plan_of(mesh, **config)
        got = trained(plan, layer_wise_tx(plan))
        one = plan_of(fsdp.make_mesh(devices=jax.devices()[:1]))
        want = trained(one, plain_tx())
        assert worst(host(fsdp.unshard(got.params)), host(want.params)) < 1e-9


def test_updates_are_the_same_without_those_of_zero_matrices():
    # On 4 devices two have two of the six matrices of one shape, and two have one;
    # three have one of the three of another, and one has none.
    with jax.enable_x64(True):
        plan = plan_of(fsdp.make_mesh(devices=jax.devices()[:4]))
        owned = trained(plan, layer_wise_tx(plan, per_matrix=True))
        padded = trained(plan, layer_wise_tx(plan))
        got, want = (host(fsdp.unshard(state.params)) for state in (owned, padded))
        assert worst(got, want) < 1e-9


@pytest.fixture(scope="module")
def plan():
    return plan_of(fsdp.make_mesh())


def test_each_device_owns_unsharded_matrices_of_the_momentum(plan):
    state = fsdp.abstract_state(plan, layer_wise_tx(plan)).opt_state
    momenta = {
        name.rpartition(".")[2]: leaf
        for name, leaf in named_leaves(state.matrices)
        if ".mu." in name
    }
    shards = {n: m.sharding.shard_shape(m.shape) for n, m in momenta.items()}
    # 6 matrices of 16 x 64, and 3 each of the others, on 8 devices: at most one each.
    assert shards == {
        "16 x 64 split on 0": (1, 16, 64),
        "64 x 16 split on 0": (1, 64, 16),
        "13 x 17 split on 0": (1, 13, 17),
    }


def lowered(plan, tx):
    step = fsdp.make_train_step(plan, loss_fn, tx)
    state = fsdp.abstract_state(plan, tx)
    return step.lower(state, jax.tree.map(np.float32, batch()))


def optimizer_collectives(lowered_step):
    text = lowered_step.compile().as_text()
    in_optimizer = [line for line in text.splitlines() if "/optimizer/" in line]
    return collectives("\n".join(in_optimizer))


def test_unsharded_matrices_are_orthogonalised_without_communication(plan):
    found = optimizer_collectives(lowered(plan, layer_wise_tx(plan)))
    assert {c.op for c in found if c.size > 1} == {"all-to-all"}
    # The negative control: a split matrix communicates in each iteration.
    plain = optimizer_collectives(lowered(plan, plain_tx()))
    assert {c.op for c in plain if c.size > 1} & {"all-reduce", "all-gather"}


def test_zero_matrices_are_passed_over_without_communication(plan):
    step = lowered(plan, layer_wise_tx(plan, per_matrix=True))
    found = optimizer_collectives(step)
    assert {c.op for c in found if c.size > 1} == {"all-to-all"}
    assert step.as_text().count("stablehlo.case") == 3  # one a shape
