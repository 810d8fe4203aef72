"""Saving while training goes on: nothing is lost, whatever happens meanwhile."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import random
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.checkpoint_managers as policies
import pytest
from helpers import saving_worker
from helpers.damage import ORBAX_FAILS_NOISILY, file_size_limited
from helpers.errors import facts
from helpers.saving_worker import check, like, state_at
from jax.experimental import multihost_utils

import fsdp_jax as fsdp

ROOT = Path(__file__).parents[2]
TORTURE = ROOT / "benchmarks" / "results" / "torture.json"
ROUNDS = 10  # 200 in benchmarks/torture.py

pytestmark = [ORBAX_FAILS_NOISILY, pytest.mark.versions]


@pytest.fixture(autouse=True)
def failed_writes_end_within_the_test():
    yield
    gc.collect()


def test_a_run_goes_on_where_it_stopped(tmp_path):
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.resume(like()) is None
        assert checkpointer.save(1, state_at(1), metadata={"at": (1, 2)})
        assert checkpointer.save(2, state_at(2))
    assert fsdp.checkpoint.load_metadata(tmp_path, step=1) == {"at": (1, 2)}
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        assert check(checkpointer.resume(like())) == 2
        assert check(checkpointer.resume(like(), step=1)) == 1
        assert check(checkpointer.resume(like(), step="latest-good")) == 2
        checkpointer.save(3, state_at(3))
        checkpointer.wait()
        assert fsdp.latest_step(tmp_path) == 3


def test_a_run_goes_back_to_the_save_that_is_still_being_written(tmp_path):
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_at(step))
            assert check(checkpointer.resume(like())) == step
        checkpointer.save(3, state_at(3))
    assert fsdp.latest_step(tmp_path) == 3


def test_what_is_saved_in_the_background_is_what_save_saves(tmp_path):
    fsdp.save(tmp_path / "now", state_at(1))
    with fsdp.Checkpointer(tmp_path / "behind") as checkpointer:
        checkpointer.save(1, state_at(1))
    for path in ("now", "behind"):
        assert check(fsdp.load(tmp_path / path, like())) == 1
        assert fsdp.checkpoint.verify(tmp_path / path).num_leaves == 5


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    def spoil(state):
        return jax.tree.map(lambda x: x * 0 - 1, (state.params, state.opt_state))

    state = state_at(1)
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        jax.block_until_ready(jax.jit(spoil, donate_argnums=0)(state))
        for leaf in jax.tree.leaves(state):
            leaf.delete()  # where jax did not: on the CPU it spares what is in use
    assert check(fsdp.load(tmp_path, like())) == 1


def test_policies_of_orbax_say_which_steps_are_saved_and_which_stay(tmp_path):
    with fsdp.Checkpointer(
        tmp_path,
        save_decision_policy=policies.FixedIntervalPolicy(2),
        preservation_policy=policies.LatestN(2),
    ) as checkpointer:
        saved = [
            step for step in range(1, 9) if checkpointer.save(step, state_at(step))
        ]
    assert saved == [2, 4, 6, 8]
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdecimal()) == [
        6,
        8,
    ]


def test_a_step_must_be_the_one_of_the_state(tmp_path):
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match=facts("save(2, state)", "1")):
            checkpointer.save(2, state_at(1))
        with pytest.raises(ValueError, match=facts("metadata['seen']", "set")):
            checkpointer.save(1, state_at(1), metadata={"seen": {1}})
        checkpointer.save(1, state_at(1))
    with pytest.raises(ValueError, match=facts(repr(str(tmp_path)), "step 1")):
        fsdp.save(tmp_path, state_at(1))


@pytest.mark.parametrize("step", [1.0, np.float64(1), True, np.bool_(True), "1", None])
def test_what_is_no_whole_number_is_not_saved_as_a_step(step, tmp_path):
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match=facts(f"save({step!r}, state)")):
            checkpointer.save(step, state_at(1))
    assert fsdp.latest_step(tmp_path) is None
    assert not [path for path in tmp_path.iterdir() if path.name[0] == "1"]


@pytest.mark.parametrize("number", [np.int64, jnp.int32, np.uint8])
def test_a_whole_number_of_any_type_is_a_step(number, tmp_path):
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(number(1), state_at(1))
    assert fsdp.latest_step(tmp_path) == 1


def test_sigterm_saves_at_the_next_step_and_exits(tmp_path):
    never = policies.FixedIntervalPolicy(1000)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        with fsdp.Checkpointer(tmp_path, save_decision_policy=never) as checkpointer:
            assert not checkpointer.save(1, state_at(1))
            os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.save(2, state_at(2))
            raise AssertionError("it went on")
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        assert check(checkpointer.resume(like())) == 2


def test_a_resumed_run_asks_jax_to_stop_by_a_count_that_begins_anew(
    tmp_path, monkeypatch
):
    # jax names the question after the last one that was asked, 1 before the first: by
    # steps, SIGTERM before the first save of a resumed run was never heeded.
    asked = []

    def ask(number: int) -> bool:
        asked.append(number)
        return number == asked[0] + 1

    fsdp.save(tmp_path, state_at(7))
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", ask)
    with pytest.raises(SystemExit):
        with fsdp.Checkpointer(tmp_path) as checkpointer:
            checkpointer.resume(like())
            for step in (8, 9, 10):
                checkpointer.save(step, state_at(step))
    assert asked == [asked[0], asked[0] + 1]
    assert fsdp.latest_step(tmp_path) == 9


def test_sigterm_after_the_step_was_saved_exits_without_saving_it_twice(tmp_path):
    with pytest.raises(SystemExit):
        with fsdp.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, state_at(1))
            checkpointer.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.save(1, state_at(1))
    assert fsdp.latest_step(tmp_path) == 1


def test_a_save_that_fails_for_want_of_room_spoils_neither_the_last_nor_the_next(
    tmp_path,
):
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_at(1))
        checkpointer.wait()
        with file_size_limited(100_000):
            checkpointer.save(2, state_at(2))
            with pytest.raises(
                RuntimeError, match=facts("Step 2", f"os_error_code='{errno.EFBIG}'")
            ):
                checkpointer.wait()
        assert check(fsdp.load(tmp_path, like())) == 1
        checkpointer.wait()  # said once
        checkpointer.save(3, state_at(3))
    assert check(fsdp.load(tmp_path, like())) == 3
    assert fsdp.checkpoint.verify(tmp_path, step=1) and fsdp.checkpoint.verify(
        tmp_path, step=3
    )


def test_a_save_by_hand_without_room_is_an_error_of_the_system(tmp_path):
    fsdp.save(tmp_path, state_at(1))
    with pytest.raises(OSError, match=facts(str(tmp_path), f"'{errno.EFBIG}'")):
        with file_size_limited(100_000):
            fsdp.save(tmp_path, state_at(2))
    assert check(fsdp.load(tmp_path, like())) == 1
    fsdp.save(tmp_path, state_at(2))
    assert check(fsdp.load(tmp_path, like())) == 2


def test_a_save_that_failed_unnoticed_is_logged_and_the_next_one_is_made(
    tmp_path, caplog
):
    with caplog.at_level(logging.ERROR, logger="fsdp_jax"):
        with fsdp.Checkpointer(tmp_path) as checkpointer:
            with file_size_limited(100_000):
                checkpointer.save(1, state_at(1))
                checkpointer.save(2, state_at(2))  # waits for the first
            checkpointer.save(3, state_at(3))
    assert "Step 1 is not saved" in caplog.text
    assert check(fsdp.load(tmp_path, like())) == 3


def test_a_failure_of_the_last_save_is_raised_at_the_end(tmp_path):
    with pytest.raises(
        RuntimeError, match=facts("Step 1", f"os_error_code='{errno.EFBIG}'")
    ):
        with file_size_limited(100_000):
            with fsdp.Checkpointer(tmp_path) as checkpointer:
                checkpointer.save(1, state_at(1))
    fsdp.save(tmp_path, state_at(1))  # by hand, once there is room
    assert check(fsdp.load(tmp_path, like())) == 1


def test_no_committed_step_is_lost_when_the_process_is_killed_at_any_moment(tmp_path):
    """Each round first checks what the one before left, and goes on from there."""
    moments = random.Random(0)
    for _ in range(ROUNDS):
        committed = saving_worker.kill_while_saving(tmp_path, moments.uniform(0, 1.5))
        newest = fsdp.latest_step(tmp_path) or 0
        assert newest >= committed[-1]
    assert check(fsdp.load(tmp_path, like())) == newest
    assert newest > ROUNDS / 2  # the kills did not all come before the first save


def test_the_long_form_lost_nothing_either():
    """What benchmarks/torture.py found when it was last run."""
    found = json.loads(TORTURE.read_text())
    assert found["odd"] == []
    assert found["flips"]["rounds"] >= 1000 and found["kills"]["rounds"] >= 100
    assert found["flips"]["refused"] > found["flips"]["rounds"] / 2
    swaps = ("chunk_moved", "file_of_another_step", "folders_exchanged")
    assert sum(found[swap]["rounds"] for swap in swaps) >= 999
    for kind in ("flips", *swaps):
        assert found[kind]["wrong_values_returned"] == found[kind]["errors"] == 0
    for kind in ("rollbacks", "second_writers", "full_disk"):
        assert found[kind]["rounds"] >= 100
    assert (
        found["rollbacks"]["steps_not_saved"] == found["rollbacks"]["steps_lost"] == 0
    )
    assert found["second_writers"]["refused"] == found["second_writers"]["rounds"]
    assert found["full_disk"]["saves_that_failed"] > 0
    assert found["full_disk"]["previous_step_spoilt"] == 0
    assert found["full_disk"]["next_save_failed"] == 0
    assert found["kills"]["killed_while_writing"] > found["kills"]["rounds"] / 2
    assert found["kills"]["steps_lost"] == found["kills"]["latest_unreadable"] == 0
