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


def layer_wise_tx(plan):
    return fsdp.optim.layer_wise(plan, muon(), optax.adam(1e-2), MATRICES)


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


def optimizer_collectives(plan, tx):
    step = fsdp.make_train_step(plan, loss_fn, tx)
    lowered = step.lower(
        fsdp.abstract_state(plan, tx), jax.tree.map(np.float32, batch())
    )
    text = lowered.compile().as_text()
    in_optimizer = [line for line in text.splitlines() if "/optimizer/" in line]
    return collectives("\n".join(in_optimizer))


def test_unsharded_matrices_are_orthogonalised_without_communication(plan):
    found = optimizer_collectives(plan, layer_wise_tx(plan))
    assert {c.op for c in found if c.size > 1} == {"all-to-all"}
    # The negative control: a split matrix communicates in each iteration.
    plain = optimizer_collectives(plan, plain_tx())
    assert {c.op for c in plain if c.size > 1} & {"all-reduce", "all-gather"}


def test_what_is_no_matrix_is_refused_with_all_its_names(plan):
    with pytest.raises(ValueError) as error:
        fsdp.optim.layer_wise(
            plan, muon(), optax.adam(1e-2), ("layers.bias", "layers.up", "nothing")
        )
    says = str(error.value)
    assert "'layers.bias' (3, 64) is not a matrix" in says
    assert "'nothing' matches nothing that is trained" in says


# Muon as its author defines it, in numpy.


def orthogonalised(matrix):
    """Five Newton-Schulz iterations with the published coefficients."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def reference_steps(lr, momentum):
    """Weights of `MATRICES` after three steps; all other weights stay."""
    weights = jax.tree.map(np.asarray, make_weights(jax.random.key(0)))
    layers, buffers = weights["layers"], {}
    for _ in range(3):
        grads = jax.grad(loss_fn)(weights, batch())["layers"]
        for name in (path.rpartition(".")[2] for path in MATRICES):
            grad = np.asarray(grads[name])
            buffers[name] = momentum * buffers.get(name, 0.0) + grad
            nesterov = grad + momentum * buffers[name]
            updates = np.stack([orthogonalised(one) for one in nesterov])
            rows, cols = grad.shape[1:]
            scale = max(1.0, cols / rows) ** 0.5  # Outputs per input, [in, out] here.
            layers[name] = layers[name] - lr * scale * updates
    return weights


def test_three_steps_are_those_of_muon_as_published():
    # `optax.contrib.muon` corrects the bias of its Nesterov momentum, as Nadam does;
    # the published one has plain Nesterov momentum, which is `optax.trace`.
    published = optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.contrib.muon(
            1e-2,
            beta=0.0,
            nesterov=False,
            muon_weight_dimension_numbers=lambda tree: jax.tree.map(
                lambda leaf: STACKED, tree
            ),
        ),
    )
    with jax.enable_x64(True):
        want = reference_steps(1e-2, 0.95)
        distances = []
        for tx in (published, muon()):
            plan = plan_of(fsdp.make_mesh())
            frozen = optax.set_to_zero()
            got = trained(plan, fsdp.optim.layer_wise(plan, tx, frozen, MATRICES))
            params = host(fsdp.unshard(got.params))
            distances.append(worst(params, want, without=("bias",)))
    assert distances[0] < 1e-6 < 1e-4 < distances[1], distances
