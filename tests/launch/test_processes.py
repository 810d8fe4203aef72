"""A job on one machine: its lines, its exit status, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.errors import facts

from fsdp_jax.launch import Processes
from fsdp_jax.launch._processes import _job_status


@contextmanager
def job(code: str, num_processes: int = 3, **options):
    """Processes that run some Python, without site, so that they start in no time."""
    lines = defaultdict(list)

    def line(rank: int, text: str, is_error: bool) -> None:
        lines[rank].append((text, is_error))

    prelude = "import os, sys, time, signal\nrank = int(os.environ['RANK'])\n"
    command = [sys.executable, "-S", "-c", prelude + code]
    with Processes(command, num_processes, line=line, **options) as processes:
        yield processes, lines


def gone(pid: int) -> bool:
    """Whether there is no such process; a zombie of ours counts as gone."""
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except FileNotFoundError:
        return True


def test_lines_are_told_apart_by_process_and_stream():
    with job("print(f'I am {rank}'); print('oh', file=sys.stderr)") as (
        processes,
        lines,
    ):
        assert processes.wait(20) == 0
    for rank in range(3):
        assert sorted(lines[rank]) == [(f"I am {rank}", False), ("oh", True)]


def test_statuses_are_known_where_a_supervisor_ignores_the_ends_of_children():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with job("sys.exit(3 * (rank == 1))") as (processes, _):
            assert processes.wait(20) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_each_has_its_place_in_variables_as_torchrun_sets_them():
    names = ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "JAX_NUM_CPU_DEVICES"]
    code = f"print([os.environ[name] for name in {names}])"
    with job(code, devices_per_process=2) as (processes, lines):
        assert processes.wait(20) == 0
    for rank in range(3):
        assert lines[rank] == [(str(["3", str(rank), "127.0.0.1", "2"]), False)]


@pytest.mark.parametrize(
    "death, status, says",
    [
        ("sys.exit(7)", 7, "ended with status 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL"),
    ],
)
def test_when_one_dies_all_are_ended_and_its_status_is_kept(death, status, says):
    with job(f"if rank == 1: {death}\ntime.sleep(100)") as (processes, lines):
        began = time.monotonic()
        assert processes.wait(20) == status
        assert time.monotonic() - began < 15
        ((said, is_error),) = lines[-1]
        assert all(gone(pid) for pid in processes.pids)
    assert f"process 1 (pid {processes.pids[1]}) {says}" in said and is_error


def test_of_an_error_and_its_effect_the_status_of_the_error_is_kept():
    aborted = -signal.SIGABRT
    assert _job_status(aborted, [3]) == 3
    # The one that failed did not exit, and was ended with the others.
    assert _job_status(aborted, [-signal.SIGTERM]) == _job_status(aborted, [143]) == 134
    assert _job_status(aborted, [aborted]) == _job_status(aborted, []) == 134
    assert _job_status(-signal.SIGKILL, [3]) == 137 and _job_status(2, [2]) == 2


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
print(child.pid, flush=True)
time.sleep(100)
"""


def test_who_ignores_sigterm_is_killed_with_what_it_started(monkeypatch):
    monkeypatch.setattr("fsdp_jax.launch._processes._TERM_SECS", 0.2)
    with job(STUBBORN, 2) as (processes, lines):
        while not (lines[0] and lines[1]):
            time.sleep(0.01)
        children = [int(lines[rank][0][0]) for rank in range(2)]
        assert not any(map(gone, children))
    assert all(gone(pid) for pid in [*processes.pids, *children])


def test_what_a_process_left_behind_when_it_ended_well_is_ended():
    code = STUBBORN.rpartition("time.sleep(100)")[0]
    with job(code, 1) as (processes, lines):
        processes.wait(20)
        (child,) = [int(text) for text, _ in lines[0]]
    assert gone(child)


def test_a_job_that_takes_too_long_is_a_timeout_and_ended_behind_the_block():
    with job("time.sleep(100)", 1) as (processes, _):
        with pytest.raises(TimeoutError, match=facts("0.1 s")):
            processes.wait(0.1)
        assert processes.statuses == [None]
    assert gone(processes.pids[0])


@pytest.mark.parametrize(
    "numbers, says", [((0, None), ("processes", "0")), ((2, -1), ("devices", "-1"))]
)
def test_numbers_below_one_are_refused(numbers, says):
    with pytest.raises(ValueError, match=facts(*says, "1")):
        Processes(["true"], numbers[0], line=print, devices_per_process=numbers[1])


def test_a_program_that_does_not_exist_is_refused_and_nothing_is_left():
    with pytest.raises(ValueError, match=facts("'no-such-program'")):
        Processes(["no-such-program"], 2, line=print)


# The command


# The command, which listens to Ctrl-C also where these tests run in the background,
# whose children are born deaf to it.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from fsdp_jax.cli import main
sys.exit(main())
"""


@contextmanager
def launched(code: str, num_processes: int = 2):
    command = [sys.executable, "-c", COMMAND, "launch", "--processes"]
    command += [str(num_processes), "--", sys.executable, "-S", "-uc", code]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


WAITS = "import os, time; print(os.getpid()); time.sleep(100)"


def test_ctrl_c_ends_the_command_and_its_processes():
    with launched(WAITS) as launcher:
        pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(20) == 130
        assert all(map(gone, pids))
        assert "Traceback" not in launcher.stderr.read()


SAVES = """
import os, signal, sys, time
def save(*_): print("saved"); sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready")
time.sleep(100)
"""


def test_sigterm_is_passed_on_and_lines_begin_with_their_process():
    with launched(SAVES) as launcher:
        ready = sorted(launcher.stdout.readline() for _ in range(2))
        assert ready == ["[0] ready\n", "[1] ready\n"]
        launcher.send_signal(signal.SIGTERM)
        saved, _ = launcher.communicate(timeout=20)
        assert sorted(saved.splitlines()) == ["[0] saved", "[1] saved"]
        assert launcher.returncode == 143


@pytest.mark.parametrize("moment, status", [("__init__", 143), ("close", 0)])
def test_sigterm_while_processes_start_or_end_does_not_end_the_launcher(
    moment, status, monkeypatch
):
    from fsdp_jax.cli import main

    inner, outer = getattr(Processes, moment), []

    def told(self, *arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        inner(self, *arguments, **options)

    signalled = type("Signalled", (Processes,), {moment: told})
    monkeypatch.setattr("fsdp_jax.cli.commands._launch.Processes", signalled)
    code = "import time; time.sleep(3)" if moment == "__init__" else ""
    before = signal.signal(signal.SIGTERM, lambda number, _: outer.append(number))
    try:
        words = ["--processes", "1", "--", sys.executable, "-S", "-c", code]
        assert main(["launch", *words]) == status
    finally:
        signal.signal(signal.SIGTERM, before)
    assert outer == []


def test_an_unknown_program_is_one_line_and_status_2(capsys):
    from fsdp_jax.cli import main

    assert main(["launch", "--processes", "2", "--", "no-such-program"]) == 2
    assert capsys.readouterr().err.startswith("fsdp-jax: error: 'no-such-program'")
    assert main(["launch", "--processes", "2"]) == 2
    assert "`-- python train.py`" in capsys.readouterr().err
