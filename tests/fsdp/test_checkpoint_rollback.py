"""A run that goes back to an older step goes on saving, and loses nothing of it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

import pytest
from helpers.damage import files_of
from helpers.errors import facts
from helpers.saving_worker import check, like, state_at

import fsdp_jax as fsdp


def steps(run: Path) -> set[str]:
    return {path.name for path in run.iterdir() if path.is_dir()}


@pytest.fixture
def run(tmp_path) -> Path:
    for step in (1, 2, 3):
        fsdp.save(tmp_path, state_at(step))
    return tmp_path


def damage(step: Path) -> None:
    path = max(files_of(step), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_run_goes_on_from_the_newest_good_step_and_keeps_the_others(run, caplog):
    damage(run / "3")
    damage(run / "2")
    with fsdp.Checkpointer(run) as checkpointer:
        with pytest.warns(UserWarning, match=facts("Step")):
            state = checkpointer.resume(like(), step="latest-good")
        assert check(state) == 1
        assert steps(run) == {"1", "2", "3"}  # who only looks changes nothing
        with caplog.at_level(logging.WARNING, "fsdp_jax"):
            assert checkpointer.save(2, state_at(2))
        assert "2.abandoned" in caplog.text and "3.abandoned" in caplog.text
        assert checkpointer.save(3, state_at(3))
    assert steps(run) == {"1", "2", "3", "2.abandoned", "3.abandoned"}
    assert check(fsdp.load(run, like())) == 3 and fsdp.checkpoint.verify(run, step=2)


def test_sigterm_after_a_rollback_saves_and_exits(run):
    with pytest.raises(SystemExit), fsdp.Checkpointer(run) as checkpointer:
        checkpointer.resume(like(), step=1)
        os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.save(2, state_at(2))
    assert fsdp.latest_step(run) == 2 and fsdp.checkpoint.verify(run).step == 2
    assert "3.abandoned" in steps(run)


def test_a_run_may_go_back_while_it_is_open(run):
    with fsdp.Checkpointer(run) as checkpointer:
        checkpointer.resume(like())
        assert checkpointer.save(4, state_at(4))
        assert not checkpointer.save(4, state_at(4))  # it is saved already
        assert check(checkpointer.resume(like(), step=2)) == 2
        assert not checkpointer.save(2, state_at(2))  # and so is this
        assert checkpointer.save(3, state_at(3))
    assert steps(run) == {"1", "2", "3", "3.abandoned", "4.abandoned"}


def test_a_step_before_the_newest_is_refused_where_none_was_resumed(run):
    with fsdp.Checkpointer(run) as checkpointer:
        with pytest.raises(ValueError, match=facts("step 3", "step 2")):
            checkpointer.save(2, state_at(2))
        assert checkpointer.save(4, state_at(4))


def test_a_folder_that_only_has_the_name_of_a_step_is_set_aside(run, caplog):
    (run / "4").mkdir()
    (run / "4" / "notes.txt").write_text("mine")
    with fsdp.Checkpointer(run) as checkpointer:
        with caplog.at_level(logging.WARNING, "fsdp_jax"):
            assert checkpointer.save(4, state_at(4))
    assert "4.stray" in caplog.text
    assert (run / "4.stray" / "notes.txt").read_text() == "mine"
    assert check(fsdp.load(run, like())) == 4


def test_a_folder_that_cannot_be_made_fails_one_save_and_keeps_no_thread(run):
    """Orbax's writers would wait for it, and the process would never exit."""
    before = set(threading.enumerate())
    with fsdp.Checkpointer(run) as checkpointer:
        blocked = run / "4.orbax-checkpoint-tmp"
        blocked.write_text("in the way")
        assert not checkpointer.save(4, state_at(4))
        with pytest.raises(
            fsdp.checkpoint.NotSavedError, match=facts("Step 4", blocked.name)
        ):
            checkpointer.wait()
        blocked.unlink()
        assert checkpointer.save(4, state_at(4))
    assert check(fsdp.load(run, like())) == 4
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if not thread.daemon]
