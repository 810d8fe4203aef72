"""A flipped bit is found, and the device it was on is named; nothing else is."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.errors import facts
from helpers.faults import with_faults
from helpers.flips import flip_bit
from jax.sharding import NamedSharding

import fsdp_jax as fsdp
from fsdp_jax.replay import ReplayCheck, ReplayStep

TX = optax.adam(1e-3)
EVERY = 2


def make_model(key):
    first, second = jax.random.split(key)
    return {
        "w": jax.random.normal(first, (16, 16)) / 4,
        "odd": jax.random.normal(second, (13,)) / 4,
    }


# What is added on a device in each case, to the activation and to its gradient.
CASES = [
    {},
    {6: (4.0, 0)},
    {4: (2.0**-12, 0)},
    {1: (0, 4.0)},
    {2: (0, 2.0**-12)},
    {5: (0, 0.5)},
    {2: (0.5, 0), 6: (0, 0.5)},
]
_BY_DEVICE = np.zeros((len(CASES), 8, 2), np.float32)
for number, case in enumerate(CASES):
    for device, sizes in case.items():
        _BY_DEVICE[number, device] = sizes
# By rank: none, and those of the devices of each mesh below. On the one whose first
# device is the last of all, device 0 has rank 1.
TABLES = np.stack(
    [0 * _BY_DEVICE, *(np.roll(_BY_DEVICE, by, axis=1) for by in range(3))]
)


def batch(case: int = 0):
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    row = np.arange(8, dtype=np.int32)
    return {"x": x, "row": row, "case": np.full_like(row, case)}


@functools.cache
def replay_step(by: int, *, is_wrong: bool = False, **sizes: int) -> ReplayStep:
    def loss_fn(model, batch):
        hidden = jnp.tanh(batch["x"] @ model["w"])
        hidden = with_faults(hidden, batch, TABLES, 1 + by if is_wrong else 0)
        return jnp.mean((hidden[:, :13] - model["odd"][None]) ** 2)

    devices = list(np.roll(jax.devices(), by))
    plan = fsdp.fully_shard(make_model, fsdp.make_mesh(devices=devices, **sizes))
    return ReplayStep(fsdp.make_train_step(plan, loss_fn, TX), TX)


def unchanged(given):
    return given


@dataclasses.dataclass(frozen=True)
class Flipped(ReplayStep):
    """A step with a fault of its state where it is checked."""

    before: Any = unchanged
    after: Any = unchanged

    def recorded(self, state, batch):
        new, metrics, events = super().recorded(self.before(state), batch)
        return self.after(new), metrics, events


def flipped_step(by: int, **faults: Any) -> ReplayStep:
    return Flipped(replay_step(by).step, TX, **faults)


def check_of(checked: ReplayStep | None = None, **options: Any) -> ReplayCheck:
    others = [replay_step(1), replay_step(2)]
    checked = checked or replay_step(0)
    return ReplayCheck(checked, others, every=EVERY, **options)


def fresh():
    plan = replay_step(0).plan
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    return replay_step(0).step(state, batch())[0]  # so that moments are not zero


def flipped(leaf: str, device: int, bit: int = 27):
    return functools.partial(flip_bit, leaf=leaf, device=jax.devices()[device], bit=bit)


def test_the_digest_of_a_state_is_that_of_its_values_on_any_mesh():
    state = fresh()
    # On 3 devices other padding than on 8.
    plan = fsdp.fully_shard(make_model, fsdp.make_mesh(devices=jax.devices()[:3]))
    moved = fsdp.reshard(state, plan, TX)
    assert fsdp.replay.state_digest(moved) == fsdp.replay.state_digest(state)
    other = flip_bit(state, leaf="params.odd", device=jax.devices()[1], bit=0)
    digests = fsdp.replay.state_digest(state), fsdp.replay.state_digest(other)
    assert digests[0].differences(digests[1]) == ("params.odd",)


DTYPES = ["bool", "int4", "uint8", "int64", "float8_e4m3fn", "bfloat16", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_every_dtype_is_in_the_digest(dtype):
    sharding = NamedSharding(fsdp.make_mesh(), jax.sharding.PartitionSpec("dp_shard"))
    with jax.enable_x64(True):
        # As bits: some patterns are not numbers.
        raw = np.arange(8 * 2 * np.dtype(jnp.dtype(dtype)).itemsize, dtype=np.uint8)
        values = (raw % 2 if dtype in {"bool", "int4"} else raw).view(jnp.dtype(dtype))
        array = jax.device_put(values, sharding)
        digests = set()
        bits = {"bool": 1, "int4": 3}.get(dtype, 8)
        for position in range(values.size):
            changed = values.copy()
            view = changed[position : position + 1].view(np.uint8)
            view[position % view.size] ^= 1 << position % bits
            again = jax.device_put(changed, sharding)
            digests.add(fsdp.replay.state_digest(again).sha256)
        assert fsdp.replay.state_digest(array).sha256 not in digests
    assert len(digests) == values.size


def test_steps_without_a_fault_are_the_same_bits_and_raise_nothing():
    check, state, other = check_of(), fresh(), fresh()
    metrics, plain = {}, {}
    for _ in range(EVERY + 1):
        state, metrics = check(state, batch())
        other, plain = replay_step(0).step(other, batch())
    assert fsdp.replay.state_digest(state) == fsdp.replay.state_digest(other)
    assert metrics["loss"] == plain["loss"]


# High and low bits, and large and small numbers: whoever judges by sizes takes one of
# them for another device's, or for nobody's.
FLIPS = {
    "weight, high bit": (3, {"before": flipped("params.w", 3, bit=30)}),
    "weight, low bit": (3, {"before": flipped("params.w", 3, bit=1)}),
    "moment": (5, {"before": flipped("opt_state.0.nu.w", 5)}),
    "update": (6, {"after": flipped("params.w", 6, bit=2)}),
}
WITHIN = {
    "activation, large": 1,
    "activation, small": 2,
    "gradient, large": 3,
    "gradient, small": 4,
}


def report_of(check: ReplayCheck, case: int = 0) -> fsdp.replay.CorruptionReport:
    state = fresh()
    with pytest.raises(fsdp.replay.CorruptionError, match=facts("step 2")) as caught:
        check(state, batch(case))
    return caught.value.report


@pytest.mark.parametrize("kind", FLIPS)
def test_a_flip_in_a_checked_step_is_found_and_its_device_named(kind):
    device, faults = FLIPS[kind]
    report = report_of(check_of(flipped_step(0, **faults)))
    assert (report.step, report.wrong) == (2, "step")
    assert report.devices == (jax.devices()[device],)


@pytest.mark.parametrize("kind", WITHIN)
def test_what_a_device_computes_wrong_is_found_and_the_device_named(kind):
    case = WITHIN[kind]
    report = report_of(check_of(replay_step(0, is_wrong=True)), case)
    (device,) = CASES[case]
    assert (report.step, report.wrong) == (2, "step")
    assert report.devices == (jax.devices()[device],)


def test_a_fault_of_the_replay_is_not_taken_for_one_of_the_step():
    wrong = flipped_step(1, after=flipped("params.w", 2))
    check = ReplayCheck(replay_step(0), [wrong, replay_step(2)], every=1)
    with pytest.raises(fsdp.replay.CorruptionError) as caught:
        check(fresh(), batch())
    assert caught.value.report.wrong == "replay"
    assert caught.value.report.devices == (jax.devices()[2],)


@pytest.mark.parametrize("leaf", ["params.odd", "opt_state.0.mu.w", "step"])
def test_a_flip_between_steps_is_found_before_the_next_begins(leaf):
    check = check_of()
    state, _ = check(fresh(), batch())
    if leaf == "step":  # The others follow a step that was replayed, this one another.
        state, _ = check(state, batch())
    state = flipped(leaf, 7, bit=0)(state)
    with pytest.raises(fsdp.replay.CorruptionError) as caught:
        check(state, batch())
    report = caught.value.report
    assert (report.wrong, report.leaves) == ("state", (leaf,))
    assert report.devices == (jax.devices()[7],)
    check.reset()


@pytest.mark.long
def test_a_mesh_of_another_shape_agrees_within_the_bound_and_no_flip_does():
    others = [replay_step(0, dp_outer=2), replay_step(1, dp_outer=2)]
    # Sums of 8 float32 gradients in another order: some 2^-24 each, and Adam divides
    # by their root.
    check = ReplayCheck(replay_step(0), others, every=EVERY, rtol=1e-4)
    check(fresh(), batch())
    wrong = flipped_step(0, before=flipped("params.w", 3, 30))
    check = ReplayCheck(wrong, others, every=EVERY, rtol=1e-4)
    with pytest.raises(fsdp.replay.CorruptionError, match=facts("params.w")) as caught:
        check(fresh(), batch())
    # By what the device stores: nothing else of two meshes can be compared.
    assert caught.value.report.devices == (jax.devices()[3],)


def test_a_check_without_a_third_result_is_refused():
    with pytest.raises(ValueError, match=facts("1 replays", "every=-1")):
        ReplayCheck(replay_step(0), [replay_step(1)], every=-1)


@pytest.mark.parametrize("rtol", [-1e-3, float("nan"), float("inf")])
def test_a_bound_that_bounds_nothing_is_refused(rtol):
    with pytest.raises(ValueError, match=facts("rtol")):
        ReplayCheck(replay_step(0), [replay_step(1), replay_step(2)], rtol=rtol)


@pytest.mark.long
def test_a_device_that_is_always_wrong_is_named_although_no_two_results_agree():
    wrong, *others = (replay_step(by, is_wrong=True) for by in range(3))
    report = report_of(ReplayCheck(wrong, others, every=EVERY), 5)
    assert (report.wrong, report.devices) == ("undecided", (jax.devices()[5],))


def test_two_devices_that_are_wrong_at_once_are_not_taken_for_one():
    report = report_of(check_of(replay_step(0, is_wrong=True)), 6)
    assert (report.wrong, report.devices) == ("step", ())


def test_a_state_that_is_wrong_on_all_devices_names_none():
    def all_wrong(state):
        w = state.params["w"] + 1.0
        return dataclasses.replace(state, params=state.params | {"w": w})

    report = report_of(check_of(flipped_step(0, after=all_wrong)))
    assert (report.wrong, report.devices) == ("step", ())


def offloaded_step(by: int) -> ReplayStep:
    """A step whose weights and moments are in host memory, but for the small ones."""

    def loss_fn(model, batch):
        return jnp.mean(
            (jnp.tanh(batch["x"] @ model["w"])[:, :13] - model["odd"][None]) ** 2
        )

    mesh = fsdp.make_mesh(devices=list(np.roll(jax.devices(), by)))
    offload = fsdp.OffloadPolicy(params=True, min_elements=100)
    config = fsdp.FSDPConfig(offload=offload)
    plan = fsdp.fully_shard(make_model, mesh, config=config)
    return ReplayStep(fsdp.make_train_step(plan, loss_fn, TX), TX)


def test_steps_of_a_state_in_host_memory_are_checked_too():
    first, *others = map(offloaded_step, range(3))
    check = ReplayCheck(first, others, every=1)
    params = fsdp.init_params(first.plan, jax.random.key(0))
    state = fsdp.init_state(first.plan, TX, params)
    for _ in range(2):  # Raises, if a replay differs.
        state, metrics = check(state, batch())
    assert state.params["w"].sharding.memory_kind == "pinned_host"
    assert int(state.step) == 2 and np.isfinite(metrics["loss"])
