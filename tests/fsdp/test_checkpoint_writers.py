"""One writer to a directory at a time; it is named, and readers need not wait."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.damage import file_size_limited
from helpers.errors import facts
from helpers.saving_worker import check, like, state_at

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import _lease
from fsdp_jax.checkpoint._lease import NAME, Lease


def test_a_second_writer_is_refused_by_name_and_removes_nothing(tmp_path):
    me = f"process {os.getpid()}"
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_at(1))
        with pytest.raises(ValueError, match=facts(repr(str(tmp_path)), me)):
            fsdp.Checkpointer(tmp_path)
        with pytest.raises(ValueError, match=facts(me)):
            fsdp.save(tmp_path, state_at(2))
        checkpointer.wait()
        assert check(fsdp.load(tmp_path, like())) == 1  # readers are not refused
        assert fsdp.checkpoint.verify(tmp_path).step == 1
        with pytest.raises(ValueError, match=facts(me)):
            fsdp.checkpoint.remove(tmp_path, 1, "opt_state")
    assert not (tmp_path / NAME).exists()
    fsdp.save(tmp_path, state_at(2))


def test_a_lease_goes_with_a_checkpointer_that_failed_or_was_dropped(tmp_path):
    with pytest.raises(ZeroDivisionError), fsdp.Checkpointer(tmp_path):
        _ = 1 / 0
    with pytest.raises(ValueError, match=facts("replication_groups=[]")):
        options = fsdp.checkpoint.LocalCheckpoints(
            tmp_path / "disk", 1, replication_groups=[]
        )
        fsdp.Checkpointer(tmp_path, local=options)
    fsdp.save(tmp_path, state_at(1))


def test_a_lease_that_a_full_disk_has_no_room_for_is_not_left_behind(tmp_path):
    with file_size_limited(1), pytest.raises(OSError, match=facts(errno.EFBIG)):
        Lease(tmp_path)
    assert not (tmp_path / NAME).exists()


def test_the_lease_of_a_process_that_was_killed_is_taken_at_once(tmp_path):
    program = (
        "import os, sys; from fsdp_jax.checkpoint._lease import Lease; "
        "Lease(sys.argv[1]); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    root = str(Path(fsdp.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, env=environment, capture_output=True)
    assert (tmp_path / NAME).exists()
    fsdp.save(tmp_path, state_at(1))


@pytest.fixture
def foreign(tmp_path) -> Path:
    """The lease of a writer on another machine."""
    lease = Lease(tmp_path)
    content = json.loads((tmp_path / NAME).read_bytes())
    lease.release()
    content |= {"id": "ff", "host": "node7", "machine": "another", "pid": 41}
    (tmp_path / NAME).write_text(json.dumps(content))
    return tmp_path


def test_a_writer_elsewhere_counts_as_long_as_it_renews(foreign, monkeypatch):
    file = foreign / NAME
    monkeypatch.setattr(_lease, "_LOOK_SECS", 0.01)
    times = iter(range(1, 100))
    # Its renewal, seen between two looks.
    monkeypatch.setattr(
        _lease.time,
        "sleep",
        lambda _: os.utime(file, (file.stat().st_mtime + next(times),) * 2),
    )
    with pytest.raises(ValueError, match=facts("process 41", "node7")):
        Lease(foreign)


def test_a_writer_elsewhere_that_stopped_renewing_is_replaced(foreign):
    past = (foreign / NAME).stat().st_mtime - 60
    os.utime(foreign / NAME, (past, past))
    lease = Lease(foreign)
    lease.check()
    lease.release()
    assert not (foreign / NAME).exists()


def test_a_writer_that_lost_its_lease_is_refused_its_next_save(tmp_path):
    with fsdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_at(1))
        checkpointer.wait()
        (tmp_path / NAME).unlink()
        other = Lease(tmp_path)
        with pytest.raises(ValueError, match=facts(f"process {os.getpid()}")):
            checkpointer.save(2, state_at(2))
        other.release()
        checkpointer.save(2, state_at(2))
    assert check(fsdp.load(tmp_path, like())) == 2
