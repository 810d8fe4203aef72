"""A state moves between plans without a disk: the same bits, and the bytes said."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._leaf_names import flatten
from fsdp_jax.resharding import _transfer
from fsdp_jax.sharding._padded import Padded

LAYERS, ROWS, CHUNK = 3, 8, 128
# name -> (devices, sizes of the mesh, options of the config)
LAYOUTS = {
    "fsdp on 8": (range(8), {}, {}),
    "fsdp on 4": (range(4), {}, {}),
    "the other 4, tp": (range(4, 8), {"tp": 2}, {}),
    "reversed": (range(7, -1, -1), {}, {}),
    "tp on 8": (range(8), {"tp": 4}, {}),
    "hsdp, zero 1": (range(8), {"dp_outer": 2}, {"zero_dp_strategy": 1}),
    "one": (range(1), {}, {}),
    # Three layers over two stages: the stack has a padding layer.
    "pp": (range(8), {"pp": 2}, {}),
    "pp and tp": (range(8), {"pp": 2, "tp": 2}, {}),
}
TENSOR = {"layers.up": -1, "layers.down": -2}


def make_weights(key):
    up, down, odd = jax.random.split(key, 3)
    return {
        "layers": {
            "up": 0.3 * jax.random.normal(up, (LAYERS, 8, 16)),
            "down": 0.3 * jax.random.normal(down, (LAYERS, 16, 8)),
        },
        "odd": 0.3 * jax.random.normal(odd, (13, 7)),
        "half": jax.random.normal(key, (8, 8), jnp.bfloat16),
        "scale": jnp.ones(()),
    }


def layer(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def loss_fn(weights, batch):
    x, _ = fsdp.scan(layer, weights["layers"], batch)
    rest = weights["odd"].mean() + weights["half"].astype(jnp.float32).mean()
    return jnp.mean((x * weights["scale"]) ** 2) + rest**2


def losses_of_ranks(weights, rows):
    """The loss of a rank's rows, for each of them."""
    return jnp.broadcast_to(loss_fn(weights, rows), rows.shape[:1])


@functools.cache
def plan_of(layout):
    devices, sizes, config = LAYOUTS[layout]
    mesh = fsdp.make_mesh(devices=[jax.devices()[i] for i in devices], **sizes)
    options = fsdp.FSDPConfig(
        tensor_parallel=TENSOR if sizes.get("tp") else {}, **config
    )
    return fsdp.fully_shard(make_weights, mesh, [fsdp.Stacked("layers")], options)


def adamw(plan):
    del plan
    return optax.adamw(1e-2)


def muon_and_8_bits(plan):
    stacked = optax.contrib.MuonDimensionNumbers((1,), (2,))
    muon = optax.contrib.muon(
        1e-2,
        muon_weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda leaf: stacked, tree
        ),
    )
    rest = fsdp.optim.eight_bit(optax.adamw(1e-2), min_elements=16)
    return fsdp.optim.layer_wise(plan, muon, rest, ["layers.up", "layers.down"])


def averaged_with_float8_moments(plan):
    del plan
    dtypes = {"mu": jnp.float8_e4m3fn, "nu": jnp.float8_e5m2}
    adam = fsdp.optim.precision_aware(optax.adamw(1e-2), dtypes, min_elements=16)
    return optax.chain(adam, fsdp.optim.ema_of_params(0.9))


def filled(plan, tx):
    """A state whose numbers are nowhere equal, so that no two can be exchanged."""
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(3)))
    count = itertools.count(1)

    def numbers(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        new = np.arange(leaf.size).reshape(leaf.shape) + 1000 * next(count)
        # Bits of narrow floats: all those of float8, and NaNs among others of bfloat16.
        if leaf.dtype.itemsize == 1:
            new = (new % 256).astype(np.uint8).view(leaf.dtype)
        elif leaf.dtype.itemsize == 2:
            new = (0x7F70 + new % 256).astype(np.uint16).view(leaf.dtype)
        return jax.device_put(new.astype(leaf.dtype), leaf.sharding)

    def keep_padding(leaf):
        if not isinstance(leaf, Padded):
            return jax.tree.map(numbers, leaf)
        inside = np.zeros(leaf.value.shape, bool)
        inside[tuple(map(slice, leaf.shape))] = True
        new = np.where(inside, np.asarray(numbers(leaf.value)), 0)
        value = jax.device_put(new.astype(leaf.dtype), leaf.value.sharding)
        return Padded(value, leaf.shape, leaf.of)

    return jax.tree.map(keep_padding, state, is_leaf=lambda n: isinstance(n, Padded))


def bits(tree):
    """Name -> the bytes of a leaf in its logical shape."""
    return {
        name: np.asarray(leaf.value)[tuple(map(slice, leaf.shape))].tobytes()
        for name, leaf in flatten(tree).items()
    }


def stored_as(like, state):
    """Whether each array has the shape, dtype and sharding of an abstract one."""
    same = jax.tree.map(
        lambda a, b: (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding),
        state,
        like,
    )
    return all(jax.tree.leaves(same))


def goes_and_comes_back(make_tx, *path):
    plan = plan_of(path[0])
    state = filled(plan, make_tx(plan))
    want = bits(state)
    for layout in (*path[1:], path[0]):
        plan = plan_of(layout)
        tx = make_tx(plan)
        state = fsdp.reshard(state, plan, tx, donate=True, chunk_bytes=CHUNK)
        assert stored_as(fsdp.abstract_state(plan, tx), state)
        assert bits(state) == want


def test_a_state_is_the_same_bits_on_other_devices_under_tp_and_back():
    goes_and_comes_back(muon_and_8_bits, "fsdp on 8", "the other 4, tp")


def test_averages_and_float8_moments_are_the_same_bits_in_stages_and_back():
    goes_and_comes_back(averaged_with_float8_moments, "fsdp on 8", "pp and tp")


@pytest.mark.long
@pytest.mark.parametrize("make_tx", [adamw, muon_and_8_bits])
def test_a_state_is_the_same_bits_under_every_plan_on_its_way_and_back(make_tx):
    goes_and_comes_back(make_tx, *LAYOUTS)


def test_the_collective_of_several_processes_moves_the_same_bits(monkeypatch):
    plan, other = plan_of("fsdp on 4"), plan_of("the other 4, tp")
    tx = adamw(plan)
    state = filled(plan, tx)
    monkeypatch.setattr(_transfer, "_copy", _transfer._permute)
    moved = fsdp.reshard(state, other, tx, chunk_bytes=CHUNK)
    assert stored_as(fsdp.abstract_state(other, tx), moved)
    assert bits(moved) == bits(state)


def test_training_goes_on_from_another_plan_and_back_as_if_it_had_stayed():
    plan, other = plan_of("fsdp on 8"), plan_of("tp on 8")
    tx = adamw(plan)
    step = fsdp.make_train_step(plan, loss_fn, tx)
    rows = np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32)
    forward = fsdp.make_forward(other, losses_of_ranks)
    stayed, went = (
        step(fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0))), rows)
        for _ in range(2)
    )
    away = fsdp.reshard(went[0], other, adamw(other), donate=True)
    loss = forward(fsdp.sharding.unpack(away.params), rows).mean()
    back = fsdp.reshard(away, plan, tx, donate=True)
    stayed, went = step(stayed[0], rows), step(back, rows)
    assert bits(stayed[0]) == bits(went[0])
    # The sums over tp are of other parts than those of one device.
    np.testing.assert_allclose(loss, went[1]["loss"], rtol=1e-5)


def test_parameters_alone_move_to_a_plan_that_generates():
    plan, other = plan_of("fsdp on 8"), plan_of("the other 4, tp")
    state = filled(plan, adamw(plan))
    params = fsdp.reshard(state.params, other)
    assert stored_as(other.params, params)
    assert bits(params) == bits(state.params)


def test_the_bytes_said_are_those_that_devices_lack():
    # Of 4 x 16 B rows of [8, 16] f32 in 3 layers, one row each on 8 devices, the first
    # of 4 devices keeps one of its two rows, the others have none of theirs.
    plan, other = plan_of("fsdp on 8"), plan_of("fsdp on 4")
    tx = adamw(plan)
    moves = fsdp.resharding.plan_moves(fsdp.abstract_state(plan, tx), other, tx)
    up = next(leaf for leaf in moves.leaves if leaf.name == "params.layers.up")
    assert up.bytes_moved == 7 * LAYERS * 16 * 4
    assert moves.bytes_between_processes == 0
    assert f"{up.bytes_moved:,}" in repr(moves)
    nothing = fsdp.resharding.plan_moves(fsdp.abstract_state(plan, tx), plan, tx)
    assert nothing.bytes_moved == 0


def test_a_byte_that_the_plan_does_not_have_is_found_afterwards(monkeypatch):
    plan, other = plan_of("fsdp on 8"), plan_of("fsdp on 4")
    state = filled(plan, adamw(plan))
    copy = _transfer._copy

    def one_more(*given):
        sent, count = copy(*given)
        return sent, count + 1

    monkeypatch.setattr(_transfer, "_copy", one_more)
    with pytest.raises(RuntimeError, match=facts("process 0")):
        fsdp.reshard(state.params, other)


@pytest.mark.parametrize("layout", ["tp on 8", "pp"])
def test_what_is_on_a_device_meanwhile_is_no_more_than_the_plan_says(
    layout, monkeypatch
):
    plan, other = plan_of("fsdp on 8"), plan_of(layout)
    tx = adamw(plan)
    state = filled(plan, tx)
    moves = fsdp.resharding.plan_moves(state, other, tx, donate=True, chunk_bytes=CHUNK)
    others = {id(x) for x in jax.live_arrays()} - {
        id(x) for x in jax.tree.leaves(state)
    }
    device, most = jax.devices()[0], [0]
    write = _transfer._write

    def watched(*given):
        here = [
            shard.data
            for x in jax.live_arrays()
            if id(x) not in others and not isinstance(x.dtype, jax.dtypes.extended)
            for shard in x.addressable_shards
            if shard.device == device
        ]
        buffers = {x.unsafe_buffer_pointer(): x.nbytes for x in here}
        most.append(sum(buffers.values()))
        return write(*given)

    monkeypatch.setattr(_transfer, "_write", watched)
    fsdp.reshard(state, other, tx, donate=True, chunk_bytes=CHUNK)
    # The rows of offsets that a round's programs take are not counted: 16 B each.
    assert moves.bytes_before <= max(most) <= moves.peak_bytes + 256
    assert moves.peak_bytes < moves.bytes_before + moves.bytes_after


@pytest.mark.parametrize("layout", ["fsdp on 8", "fsdp on 4"])
def test_the_old_state_is_deleted_only_if_it_is_donated(layout):
    plan, other = plan_of("fsdp on 8"), plan_of(layout)
    tx = adamw(plan)
    state = filled(plan, tx)
    want = bits(state)
    kept = fsdp.reshard(state, other, tx)
    jax.tree.map(lambda x: x.delete(), kept)
    assert bits(state) == want
    fsdp.reshard(state, other, tx, donate=True)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_a_state_that_does_not_fit_is_refused_with_all_its_leaves():
    plan, other = plan_of("fsdp on 8"), plan_of("fsdp on 4")
    state = filled(plan, adamw(plan))
    with pytest.raises(ValueError, match=facts("tx")):
        fsdp.reshard(state, other)
    with pytest.raises(ValueError, match=facts("chunk_bytes=0")):
        fsdp.reshard(state.params, other, chunk_bytes=0)
    named = ["opt_state.0.trace.odd", "opt_state.0.mu.half"]
    with pytest.raises(ValueError, match=facts(*named)):
        fsdp.reshard(state, other, optax.sgd(1e-2, momentum=0.9))
    half = jax.tree.map(lambda x: x.astype(jnp.float16), state.params)
    with pytest.raises(ValueError, match=facts("scale", "float16[]", "float32[]")):
        fsdp.reshard(half, other)


def test_every_program_of_a_move_is_compiled_once_for_all_devices():
    plan, other = plan_of("fsdp on 8"), plan_of("tp on 8")
    before = _transfer._cut_program.cache_info().currsize
    moves = fsdp.resharding.plan_moves(plan.params, other)
    fsdp.reshard(fsdp.init_params(plan, jax.random.key(0)), other)
    sizes = {piece.sizes for leaf in moves.leaves for piece in leaf.pieces}
    assert _transfer._cut_program.cache_info().currsize - before <= len(sizes)
