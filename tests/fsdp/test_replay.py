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
from fsdp_jax.replay import ReplayCheck, ReplayStep, with_rank_losses

TX = optax.adam(1e-3)
EVERY = 2


def make_model(key):
    first, second = jax.random.split(key)
    return {
        "w": jax.random.normal(first, (16, 16)) / 4,
        "odd": jax.random.normal(second, (13,)) / 4,
    }


def loss_fn(model, batch):
    hidden = jnp.tanh(batch["x"] @ model["w"]) + batch["fault"]
    return jnp.mean((hidden[:, :13] - model["odd"][None]) ** 2), {}


def batch(fault_of_rank: int | None = None):
    fault = np.zeros((8, 1), np.float32)
    if fault_of_rank is not None:
        fault[fault_of_rank] = 2.0**-10
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    return {"x": x, "fault": fault}


@functools.cache
def replay_step(by: int, **sizes: int) -> ReplayStep:
    devices = list(np.roll(jax.devices(), by))
    plan = fsdp.fully_shard(make_model, fsdp.make_mesh(devices=devices, **sizes))
    loss = with_rank_losses(loss_fn)
    return ReplayStep(fsdp.make_train_step(plan, loss, TX, has_aux=True), TX)


@dataclasses.dataclass(frozen=True)
class Faulty:
    """A step with a fault: what it does before and after with state and batch."""

    step: Any
    state: Any = staticmethod(lambda state: state)
    batch: Any = staticmethod(lambda batch: batch)
    after: Any = staticmethod(lambda state: state)

    @property
    def plan(self):
        return self.step.plan

    def __call__(self, state, batch):
        new, metrics = self.step(self.state(state), self.batch(batch))
        return self.after(new), metrics


def check_of(faulty: dict[str, Any] | None = None, **options: Any) -> ReplayCheck:
    checked = replay_step(0)
    step: Any = checked.step if faulty is None else Faulty(checked.step, **faulty)
    return ReplayCheck(
        ReplayStep(step, TX), [replay_step(1), replay_step(2)], every=EVERY, **options
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


FAULTS = {
    "weight": dict(state=flipped("params.w", 3, bit=30)),
    "moment": dict(state=flipped("opt_state.0.nu.w", 5)),
    "update": dict(after=flipped("params.w", 6, bit=2)),
    "activation": dict(batch=lambda _: batch(fault_of_rank=4)),
}
WHERE = {"weight": 3, "moment": 5, "update": 6, "activation": 4}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_in_a_checked_step_is_found_and_its_device_named(kind):
    check = check_of(FAULTS[kind])
    state = fresh()
    with pytest.raises(fsdp.replay.CorruptionError, match=facts("step 2")) as caught:
        check(state, batch())
    report = caught.value.report
    assert (report.step, report.wrong) == (2, "step")
    assert report.devices == (jax.devices()[WHERE[kind]],)


def test_a_fault_of_the_replay_is_not_taken_for_one_of_the_step():
    wrong = ReplayStep(Faulty(replay_step(1).step, after=flipped("params.w", 2)), TX)
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
    faulty = ReplayStep(
        Faulty(replay_step(0).step, state=flipped("params.w", 3, 30)), TX
    )
    check = ReplayCheck(faulty, others, every=EVERY, rtol=1e-4)
    with pytest.raises(fsdp.replay.CorruptionError, match=facts("params.w")):
        check(fresh(), batch())


def test_a_check_without_a_third_result_is_refused():
    with pytest.raises(ValueError, match=facts("1 replays", "every=-1")):
        ReplayCheck(replay_step(0), [replay_step(1)], every=-1)


@pytest.mark.parametrize("rtol", [-1e-3, float("nan"), float("inf")])
def test_a_bound_that_bounds_nothing_is_refused(rtol):
    with pytest.raises(ValueError, match=facts("rtol")):
        ReplayCheck(replay_step(0), [replay_step(1), replay_step(2)], rtol=rtol)


def test_shards_of_other_processes_are_not_compared(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=facts("2")):
        ReplayCheck(replay_step(0), [replay_step(1), replay_step(2)])
