"""When one of four processes dies or stops, the others end and name it, within 60 s.

And the same command goes on from the last step that was committed.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from bridge_helpers import write_llama
from distributed import training
from distributed.importing import WAYS, sharded_mould
from helpers.processes import Recorded, command_of

import bridge
import fsdp_jax as fsdp

pytestmark = pytest.mark.distributed

PROCESSES, VICTIM, STEPS = 4, 2, 12


def imports(folder: str) -> None:
    """Imports a model; the victim is killed when it has half of it."""

    def progress(done: int, total: int) -> None:
        if jax.process_index() == VICTIM and 2 * done > total:
            os.kill(os.getpid(), signal.SIGKILL)

    fsdp.report_progress("import")
    mould = sharded_mould(bridge.from_hf_config(folder), WAYS["first dim"])
    bridge.load_hf(folder, mould, progress=progress)


def trains(directory: str, step_secs: float) -> None:
    """Goes on where it stopped, and prints each step when it is done."""
    plan = training.make_plan("ZeRO-3")
    step = fsdp.make_train_step(plan, training.loss_fn, training.TX)
    rows = itertools.cycle(training.batches(plan))
    with fsdp.Checkpointer(directory) as checkpointer:
        state = checkpointer.resume(fsdp.abstract_state(plan, training.TX))
        state = training.start(plan) if state is None else state
        start = int(state.step)
        print("start", start, flush=True)
        for number in range(start + 1, STEPS + 1):
            fsdp.report_progress("training", number)
            time.sleep(step_secs)
            state, metrics = step(state, next(rows))
            metrics["loss"].block_until_ready()
            checkpointer.save(number, state)
            print("step", number, flush=True)


def others(job: Recorded) -> list[str]:
    """What each process but the victim wrote."""
    ranks = [rank for rank in range(PROCESSES) if rank != VICTIM]
    return ["\n".join(job.lines[rank]) for rank in ranks]


def assert_all_gone(job: Recorded) -> None:
    for pid in job.processes.pids:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)


def started(function, *arguments, **options) -> Recorded:
    return Recorded(command_of(function, *arguments), PROCESSES, **options)


def test_a_process_killed_in_mid_import_is_named_by_the_others(tmp_path):
    job = started(imports, str(write_llama(tmp_path / "llama", np.float32)))
    with job.processes as processes:
        assert processes.wait(60) == 128 + signal.SIGKILL
    pid = job.processes.pids[VICTIM]
    for said in others(job):
        assert re.search(rf"process 2 \(.*pid {pid}\) .*killed.*, in 'import'", said), (
            job.said
        )
    assert_all_gone(job)


def test_after_a_kill_and_a_stop_in_mid_step_the_same_command_goes_on(tmp_path):
    killed = started(trains, str(tmp_path), 0.05)
    with killed.processes as processes:
        killed.await_line(VICTIM, "step 3")
        os.kill(processes.pids[VICTIM], signal.SIGKILL)
        began = time.monotonic()
        assert processes.wait(60) == 128 + signal.SIGKILL
        assert time.monotonic() - began < 60
    for said in others(killed):
        assert re.search(r"stops: process 2 \(.*killed.*, in step \d", said), (
            killed.said
        )
    assert_all_gone(killed)

    patience = fsdp.Patience(silent_secs=3, report_secs=2)
    stopped = started(trains, str(tmp_path), 0.05, patience=patience)
    with stopped.processes as processes:
        first = resumed(stopped)
        assert first >= 2  # what 4 processes had committed when one was killed
        stopped.await_line(VICTIM, f"step {first + 2}")
        os.kill(processes.pids[VICTIM], signal.SIGSTOP)
        began = time.monotonic()
        assert processes.wait(60) == 1
        assert time.monotonic() - began < 60
    for said in others(stopped):
        assert re.search(r"process 2 \(.*no sign of life .*in step \d", said), (
            stopped.said
        )
    assert_all_gone(stopped)

    last = started(trains, str(tmp_path), 0.0)
    with last.processes as processes:
        assert processes.wait(90) == 0, last.said
    assert resumed(last) > first
    assert fsdp.latest_step(tmp_path) == STEPS
    assert [Path(path).name for path in tmp_path.glob("*tmp*")] == []


def resumed(job: Recorded) -> int:
    """The step from which all processes go on."""
    for rank in range(PROCESSES):
        job.await_line(rank, "start")
    starts = {
        line for lines in job.lines.values() for line in lines if "start " in line
    }
    (line,) = starts
    return int(line.split()[1])
