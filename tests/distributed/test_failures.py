"""When one of four processes dies or stops, the others end and name it, within 60 s."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import sys
import time

import jax
import numpy as np
import pytest
from bridge_helpers import write_llama
from distributed import training
from distributed.importing import WAYS, sharded_abstract_tree
from helpers.processes import Recorded, command_of
from jax.experimental import multihost_utils

import bridge
import fsdp_jax as fsdp
from fsdp_jax.launch._cluster import HOSTED

pytestmark = pytest.mark.distributed

PROCESSES, VICTIM = 4, 2


def imports(folder: str) -> None:
    """Imports a model; the victim is killed when it has half of it."""

    def progress(done: int, total: int) -> None:
        if jax.process_index() == VICTIM and 2 * done > total:
            os.kill(os.getpid(), signal.SIGKILL)

    fsdp.launch.report_progress("import")
    like = sharded_abstract_tree(bridge.from_hf_config(folder), WAYS["first dim"])
    bridge.load_hf(folder, like, progress=progress)


def trains() -> None:
    """Prints each step when it is done."""
    plan = training.make_plan("ZeRO-3")
    step = fsdp.make_train_step(plan, training.loss_fn, training.TX)
    state, rows = training.start(plan), itertools.cycle(training.batches(plan))
    for number in itertools.count(1):
        fsdp.launch.report_progress("training", number)
        state, metrics = step(state, next(rows))
        metrics["loss"].block_until_ready()
        print("step", number, flush=True)


def raises() -> None:
    """One fails, where the others wait for it within jax."""
    if jax.process_index() == VICTIM:
        raise ValueError("on purpose")
    multihost_utils.process_allgather(np.zeros(1))


EXITS = """
import sys, time
import jax
import fsdp_jax as fsdp
fsdp.initialize()
if jax.process_index() == 2:
    sys.exit(3)
time.sleep(100)
"""


def dies_first() -> None:
    """Process 0 is killed, while the other one waits for it within jax."""
    multihost_utils.process_allgather(np.zeros(1))  # what loads says much on stderr
    print("ready", flush=True)
    multihost_utils.process_allgather(np.zeros(1))  # Both have said so.
    if jax.process_index() == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    multihost_utils.process_allgather(np.zeros(1))


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
        assert processes.wait(60) == 128 + signal.SIGKILL, job.said
    pid = job.processes.pids[VICTIM]
    for said in others(job):
        assert re.search(
            rf"process 2 \(.*pid {pid}\) .*(killed|SIGKILL).*, in 'import'", said
        ), job.said
    assert_all_gone(job)


def test_a_process_that_is_stopped_in_mid_step_is_named_by_the_others():
    timeouts = fsdp.launch.Timeouts(silent_secs=3, report_secs=2)
    job = started(trains, timeouts=timeouts)
    with job.processes as processes:
        job.await_line(VICTIM, "step 3")
        os.kill(processes.pids[VICTIM], signal.SIGSTOP)
        began = time.monotonic()
        assert processes.wait(60) == 1, job.said
        assert time.monotonic() - began < 60
    for said in others(job):
        assert re.search(r"process 2 \(.*no sign of life .*in step \d", said), job.said
    assert_all_gone(job)


def test_what_one_process_raises_is_said_by_all():
    job = started(raises)
    with job.processes as processes:
        assert processes.wait(60) == 1, job.said
    for said in others(job):
        assert "process 2 (" in said and "ValueError: on purpose" in said, job.said
    assert_all_gone(job)


def test_the_status_of_a_process_that_exits_with_one_is_that_of_the_job():
    # A program of its own: that of the other jobs catches what its function raises.
    job = Recorded([sys.executable, "-c", EXITS], PROCESSES)
    with job.processes as processes:
        assert processes.wait(60) == 3, job.said
    for said in others(job):
        assert "process 2 (" in said and "SystemExit: 3" in said, job.said
    assert_all_gone(job)


@pytest.mark.parametrize(
    ("coordinator", "reason"),
    [
        ("in the launcher", r"process 0 \(.*pid {pid}\) .*(killed|SIGKILL)"),
        ("in process 0", r"the coordinator of the job, process 0 .*killed"),
    ],
)
def test_a_killed_process_0_is_said_in_one_line_without_xlas_log(coordinator, reason):
    command = command_of(dies_first)
    if coordinator == "in process 0":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = ["env", "-u", HOSTED, f"MASTER_PORT={port}", *command]
    job = Recorded(command, 2)
    with job.processes as processes:
        assert processes.wait(60) == 128 + signal.SIGKILL, job.said
    lines = [line for line in job.lines[1] if not line.startswith("[Gloo]")]
    said, *more = lines[lines.index("ready") + 1 :]
    assert not more, job.said
    pid = job.processes.pids[0]
    assert re.search(f"process 1 .* stops: {reason.format(pid=pid)}", said), job.said
