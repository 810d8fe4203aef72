"""A parameter goes on with its own optimizer state, or the load is refused by name.

The oracle is behaviour: what an optimizer makes of zero gradients shows its momentum,
parameter by parameter, whatever its state looks like.
"""

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

# Muon orthogonalises in float32, on other devices in another order; all other updates
# are those of the same numbers.
RTOL = 2e-5
SHAPES = {
    "bias": (5,),
    "head": (8, 16),
    "layers.gate": (3, 16, 8),
    "layers.odd": (3, 5, 7),
    "layers.up": (3, 16, 8),  # as gate: all that differs is the name
}
MATRICES = ("layers.gate", "layers.odd", "layers.up")
STACKED = optax.contrib.MuonDimensionNumbers((1,), (2,))


def nested(leaves):
    layers = {n.partition(".")[2]: x for n, x in leaves.items() if "." in n}
    return {n: x for n, x in leaves.items() if "." not in n} | {"layers": layers}


def make_weights(key):
    return nested({name: jnp.zeros(shape) for name, shape in SHAPES.items()})


def gradients():
    random = np.random.default_rng(0)
    drawn = {n: random.normal(size=shape) for n, shape in SHAPES.items()}
    return nested({name: jnp.asarray(x, jnp.float32) for name, x in drawn.items()})


def plan_of(num_devices, config=None, **mesh):
    devices = jax.devices()[:num_devices]
    return fsdp.fully_shard(
        make_weights,
        fsdp.make_mesh(devices=devices, **mesh),
        [fsdp.Stacked("layers")],
        fsdp.FSDPConfig(**config or {}),
    )


def updated(plan, tx, state, grads):
    """What the optimizer makes of gradients, by name, and the state then."""
    like = fsdp.abstract_state(plan, tx).opt_state

    @jax.jit
    def update(params, opt_state, grads):
        given = trainable(plan, grads), fsdp.sharding.unpack(opt_state)
        seen = seen_by_optimizer(plan, fsdp.sharding.unpack(params))
        updates, new = tx.update(*given, seen)
        return updates, pack(new, like)

    updates, new = update(state.params, state.opt_state, grads)
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(updates)}
    return arrays, fsdp.TrainState(**{**vars(state), "opt_state": new})


def of_rest(plan, tx, state):
    return updated(plan, tx, state, jax.tree.map(jnp.zeros_like, gradients()))[0]


def started(plan, tx):
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    return updated(plan, tx, state, gradients())[1]


def matrices_of(plan):
    trained = {param.name for param in plan.param_plans if param.is_optimized}
    return tuple(name for name in MATRICES if name in trained)


def muon():
    return optax.contrib.muon(
        1e-2,
        muon_weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda leaf: STACKED, tree
        ),
    )


def by_position():
    """One of a user's own, whose state forgets the names."""

    def init(params):
        return tuple(jnp.zeros_like(leaf) for leaf in jax.tree.leaves(params))

    def update(updates, state, params=None):
        leaves, treedef = jax.tree.flatten(updates)
        new = tuple(g + 0.5 * s for g, s in zip(leaves, state, strict=True))
        return treedef.unflatten(new), new

    return optax.GradientTransformation(init, update)


def by_dotted_name():
    """One of a user's own, with a dictionary by dotted name."""

    def init(params):
        return {name: jnp.zeros_like(leaf) for name, leaf in named_leaves(params)}

    def update(updates, state, params=None):
        new = {name: g + 0.5 * state[name] for name, g in named_leaves(updates)}
        return jax.tree.structure(updates).unflatten(new.values()), new

    return optax.GradientTransformation(init, update)


def labelled(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "fast" if "up" in str(path) else "slow", params
    )


OPTIMIZERS = {
    "adam": lambda plan: optax.adam(1e-2),
    "sgd with momentum": lambda plan: optax.sgd(1e-2, momentum=0.9),
    "chained": lambda plan: optax.chain(
        optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.adamw(1e-2)
    ),
    "labelled": lambda plan: optax.multi_transform(
        {"fast": optax.sgd(1.0, momentum=0.9), "slow": optax.adam(1e-2)}, labelled
    ),
    "dotted names": lambda plan: by_dotted_name(),
    "8 bits": lambda plan: fsdp.optim.eight_bit(optax.adam(1e-2), min_elements=300),
    "narrow floats": lambda plan: fsdp.optim.precision_aware(
        optax.adam(1e-2), {"mu": jnp.float8_e4m3fn, "nu": jnp.float16}
    ),
    "layer-wise muon": lambda plan: fsdp.optim.layer_wise(
        plan, muon(), optax.adam(1e-2), matrices_of(plan)
    ),
    "layer-wise numbers": lambda plan: fsdp.optim.layer_wise(
        plan, matrices_normalised(), optax.adam(1e-2), matrices_of(plan)
    ),
    # Its second moment has a row for each matrix, beside whole matrices of momentum.
    "layer-wise rows": lambda plan: fsdp.optim.layer_wise(
        plan, rows_normalised(), optax.adam(1e-2), matrices_of(plan)
    ),
}


def matrices_normalised():
    """Like `rows_normalised`, with one number for each matrix."""

    def init(params):
        return jax.tree.map(lambda x: x[:, 0, 0], params), optax.trace(0.9).init(params)

    def update(updates, state, params=None):
        sizes, inner = state
        updates, inner = optax.trace(0.9).update(updates, inner)
        sizes = jax.tree.map(lambda s, u: 0.5 * s + (u**2).mean((1, 2)), sizes, updates)
        scaled = jax.tree.map(lambda u, s: u / (1 + s[:, None, None]), updates, sizes)
        return scaled, (sizes, inner)

    return optax.GradientTransformation(init, update)


def rows_normalised():
    def init(params):
        return jax.tree.map(lambda x: x[:, :, 0], params), optax.trace(0.9).init(params)

    def update(updates, state, params=None):
        rows, inner = state
        updates, inner = optax.trace(0.9).update(updates, inner)
        rows = jax.tree.map(lambda r, u: 0.5 * r + (u**2).mean(-1), rows, updates)
        scaled = jax.tree.map(lambda u, r: u / (1 + r[:, :, None]), updates, rows)
        return scaled, (rows, inner)

    return optax.GradientTransformation(init, update)


TARGETS = {
    "4 devices, HFSDP": (4, {"outer_dp_sharding_strategy": 1}, {"dp_outer": 2}),
    "2 devices, ZeRO-1": (2, {"zero_dp_strategy": 1}, {}),
    "tp 2": (4, {"tensor_parallel": {"layers.gate": 0, "layers.up": 1}}, {"tp": 2}),
}


CASES = [
    *((name, "4 devices, HFSDP") for name in OPTIMIZERS if name != "layer-wise rows"),
    ("layer-wise rows", "tp 2"),
    ("layer-wise rows", "2 devices, ZeRO-1"),
]


@pytest.mark.parametrize("name, target", CASES)
def test_state_is_each_parameters_own_on_any_devices(name, target, tmp_path):
    plan, make_tx = plan_of(8), OPTIMIZERS[name]
    state = started(plan, make_tx(plan))
    fsdp.save(tmp_path, state)
    want = of_rest(plan, make_tx(plan), state)
    num_devices, config, mesh = TARGETS[target]
    other = plan_of(num_devices, config, **mesh)
    like = fsdp.abstract_state(other, make_tx(other))
    got = of_rest(other, make_tx(other), fsdp.load(tmp_path, like))
    assert set(got) == set(want)
    check_same(got, want)


def check_same(got, want):
    for parameter, value in got.items():
        scale = RTOL * abs(want[parameter]).max()
        np.testing.assert_allclose(value, want[parameter], rtol=RTOL, atol=scale)


@pytest.mark.parametrize("name", ["adam", "layer-wise rows"])
def test_a_parameter_frozen_between_runs_passes_its_state_to_no_other(name, tmp_path):
    plan, make_tx = plan_of(8), OPTIMIZERS[name]
    state = started(plan, make_tx(plan))
    fsdp.save(tmp_path, state)
    want = of_rest(plan, make_tx(plan), state)
    other = plan_of(8, {"frozen": ("layers.gate",)})
    like = fsdp.abstract_state(other, make_tx(other))
    with pytest.raises(ValueError, match=facts("layers.gate")):
        fsdp.load(tmp_path, like)
    # Asked to pass over it, the others have their own.
    loaded = fsdp.load(tmp_path, like, strict="raise_unexpected")
    got = of_rest(other, make_tx(other), loaded)
    assert set(got) == set(want) - {"layers.gate"}
    check_same(got, want)


@pytest.mark.parametrize(
    "tx, leaf",
    [
        (optax.flatten(optax.trace(0.9)), "opt_state.trace"),
        (optax.chain(optax.clip(1.0), by_position()), "opt_state.1.0"),
    ],
    ids=["flat", "by position"],
)
def test_state_that_forgets_names_loads_for_the_same_parameters_only(
    tx, leaf, tmp_path
):
    plan = plan_of(8, {"frozen": ("layers.up",)})
    state = started(plan, tx)
    fsdp.save(tmp_path, state)
    fewer = plan_of(2, {"frozen": ("layers.up",)})
    got = of_rest(fewer, tx, fsdp.load(tmp_path, fsdp.abstract_state(fewer, tx)))
    want = of_rest(plan, tx, state)
    assert {n: x.tolist() for n, x in got.items()} == {
        n: x.tolist() for n, x in want.items()
    }
    other = plan_of(8, {"frozen": ("layers.gate",)})  # of the same shape
    with pytest.raises(ValueError, match=facts(leaf)):
        fsdp.load(tmp_path, fsdp.abstract_state(other, tx), strict="ignore_all")


def test_state_by_dotted_name_is_split_like_its_parameter():
    num_devices, config, mesh = TARGETS["tp 2"]
    plan = plan_of(num_devices, config, **mesh)
    state = fsdp.abstract_state(plan, by_dotted_name())
    params = dict(named_leaves(state.params))
    for name in MATRICES:
        assert state.opt_state[name].shape == params[name].shape
    spec = state.opt_state["layers.up"].sharding.spec
    assert spec == params["layers.up"].sharding.spec
    assert "tp" in spec


def test_a_stack_keeps_what_a_load_does_not_read(tmp_path):
    make_tx = OPTIMIZERS["layer-wise rows"]
    fewer = plan_of(8, {"frozen": ("layers.gate",)})
    fsdp.save(tmp_path, started(fewer, make_tx(fewer)))
    plan = plan_of(4)
    given = started(plan, make_tx(plan))
    doubled = fsdp.TrainState(
        **{**vars(given), "opt_state": jax.tree.map(lambda x: x + x, given.opt_state)}
    )
    loaded = fsdp.load(tmp_path, doubled, strict="ignore_all")
    momenta = {
        state: dict(momenta_of(tree))
        for state, tree in {
            "given": given,
            "doubled": doubled,
            "loaded": loaded,
        }.items()
    }
    assert set(momenta["loaded"]) >= set(MATRICES)
    for name in MATRICES:
        source = "doubled" if name == "layers.gate" else "given"
        np.testing.assert_array_equal(
            momenta["loaded"][name], momenta[source][name], err_msg=name
        )


def momenta_of(state):
    """What a checkpoint of a state holds as momentum, by parameter."""
    from fsdp_jax.checkpoint._leaf_names import flatten

    for name, leaf in flatten(state).items():
        parameter = name.rpartition(".trace.")[2]
        if parameter in MATRICES and ".matrices." in name:
            whole = np.asarray(leaf.value)
            yield parameter, whole[tuple(slice(size) for size in leaf.shape)]
