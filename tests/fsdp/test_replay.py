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


@jax.custom_vjp
def with_faulty_gradient(x, fault):
    del fault
    return x


with_faulty_gradient.defvjp(
    lambda x, fault: (x, fault), lambda fault, g: (g + fault, jnp.zeros_like(fault))
)


def loss_fn(model, batch):
    hidden = jnp.tanh(batch["x"] @ model["w"]) + batch["forward"]
    hidden = with_faulty_gradient(hidden, batch["backward"] + 0 * hidden)
    return jnp.mean((hidden[:, :13] - model["odd"][None]) ** 2), {}


def batch(**faults: tuple[int, float]):
    """Rows, and faults by name: the rank that has one, and its size."""
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    places = {name: np.zeros((8, 1), np.float32) for name in ("forward", "backward")}
    for name, (rank, size) in faults.items():
        places[name][rank] = size
    return {"x": x, **places}


def with_fault(**faults: tuple[int, float]):
    return lambda _: batch(**faults)


@functools.cache
def replay_step(by: int, **sizes: int) -> ReplayStep:
    devices = list(np.roll(jax.devices(), by))
    plan = fsdp.fully_shard(make_model, fsdp.make_mesh(devices=devices, **sizes))
    return ReplayStep(fsdp.make_train_step(plan, loss_fn, TX, has_aux=True), TX)


def unchanged(given):
    return given


@dataclasses.dataclass(frozen=True)
class Faulty(ReplayStep):
    """A step with a fault where it is checked: what it does before and after."""

    state: Any = unchanged
    batch: Any = unchanged
    after: Any = unchanged

    def recorded(self, state, batch):
        new, metrics, events = super().recorded(self.state(state), self.batch(batch))
        return self.after(new), metrics, events


def faulty(by: int, **faults: Any) -> ReplayStep:
    return Faulty(replay_step(by).step, TX, **faults)


def check_of(faults: dict[str, Any] | None = None, **options: Any) -> ReplayCheck:
    checked = faulty(0, **(faults or {}))
    return ReplayCheck(
        checked, [replay_step(1), replay_step(2)], every=EVERY, **options
    )


def fresh():
    plan = replay_step(0).plan
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    return replay_step(0).step(state, batch())[0]  # so that moments are not zero


def flipped(leaf: str, device: int, bit: int = 27):
    return functools.partial(flip_bit, leaf=leaf, device=jax.devices()[device], bit=bit)


def test_the_digest_of_a_state_is_that_of_its_values_on_any_mesh():
    state = fresh()
    plan = fsdp.fully_shard(make_model, fsdp.make_mesh(devices=jax.devices()[:4]))
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
        for position in range(values.size):
            changed = values.copy()
            view = changed[position : position + 1].view(np.uint8)
            view[-1] ^= 1
            again = jax.device_put(changed, sharding)
            digests.add(fsdp.replay.state_digest(again).sha256)
        assert fsdp.replay.state_digest(array).sha256 not in digests
    assert len(digests) == values.size


def test_steps_without_a_fault_are_the_same_bits_and_raise_nothing():
    check, state, other = check_of(), fresh(), fresh()
    metrics, plain = {}, {}
    for _ in range(EVERY):
        state, metrics = check(state, batch())
        other, plain = replay_step(0).step(other, batch())
    assert fsdp.replay.state_digest(state) == fsdp.replay.state_digest(other)
    assert metrics["loss"] == plain["loss"]


# The largest and the smallest of a kind: a heuristic of sizes takes one of them for
# another device's, or for no device's.
FAULTS = {
    "weight, high bit": (3, dict(state=flipped("params.w", 3, bit=30))),
    "weight, low bit": (3, dict(state=flipped("params.w", 3, bit=1))),
    "moment": (5, dict(state=flipped("opt_state.0.nu.w", 5))),
    "update": (6, dict(after=flipped("params.w", 6, bit=2))),
    "activation, large": (6, dict(batch=with_fault(forward=(6, 4.0)))),
    "activation, small": (4, dict(batch=with_fault(forward=(4, 2.0**-12)))),
    "gradient, large": (1, dict(batch=with_fault(backward=(1, 4.0)))),
    "gradient, small": (2, dict(batch=with_fault(backward=(2, 2.0**-12)))),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_in_a_checked_step_is_found_and_its_device_named(kind):
    device, faults = FAULTS[kind]
    check, state = check_of(faults), fresh()
    with pytest.raises(fsdp.replay.CorruptionError, match=facts("step 2")) as caught:
        check(state, batch())
    report = caught.value.report
    assert (report.step, report.wrong) == (2, "step")
    assert report.devices == (jax.devices()[device],)


def test_a_fault_of_the_replay_is_not_taken_for_one_of_the_step():
    wrong = faulty(1, after=flipped("params.w", 2))
    check = ReplayCheck(replay_step(0), [wrong, replay_step(2)], every=1)
    with pytest.raises(fsdp.replay.CorruptionError) as caught:
        check(fresh(), batch())
    assert caught.value.report.wrong == "replay"
    assert caught.value.report.devices == (jax.devices()[2],)


@pytest.mark.parametrize("leaf", ["params.odd", "opt_state.0.mu.w", "step"])
def test_a_flip_between_steps_is_found_before_the_next_begins(leaf):
    check = check_of()
    state, _ = check(fresh(), batch())
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
    wrong = faulty(0, state=flipped("params.w", 3, 30))
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


def test_a_device_that_is_always_wrong_is_named_although_no_two_results_agree():
    # Of the mesh that begins with device 6, device 5 is the last.
    ranks = {0: 5, 1: 6, 2: 7}
    wrong = [
        faulty(by, batch=with_fault(backward=(rank, 0.5))) for by, rank in ranks.items()
    ]
    check = ReplayCheck(wrong[0], wrong[1:], every=1)
    with pytest.raises(fsdp.replay.CorruptionError) as caught:
        check(fresh(), batch())
    assert caught.value.report.wrong == "undecided"
    assert caught.value.report.devices == (jax.devices()[5],)


def test_two_devices_that_are_wrong_at_once_are_not_taken_for_one():
    both = {"batch": with_fault(forward=(2, 0.5), backward=(6, 0.5))}
    with pytest.raises(fsdp.replay.CorruptionError) as caught:
        check_of(both)(fresh(), batch())
    assert caught.value.report.devices == ()


def test_a_sum_that_is_wrong_on_all_devices_names_none():
    def all_wrong(state):
        w = state.params["w"] + 1.0
        return dataclasses.replace(state, params=state.params | {"w": w})

    with pytest.raises(fsdp.replay.CorruptionError) as caught:
        check_of({"after": all_wrong})(fresh(), batch())
    assert caught.value.report.devices == ()
