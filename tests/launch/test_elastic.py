"""How an elastic job decides, and how its generations follow each other."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.errors import facts
from hypothesis import given
from hypothesis import strategies as st

from fsdp_jax.cli import main
from fsdp_jax.launch import (
    ElasticConfig,
    ElasticProcesses,
    Generation,
    Processes,
    generation,
)
from fsdp_jax.launch._elastic_config import Places, parse_range

# Decisions


def test_replicas_are_divisors_of_the_largest_unless_the_batch_is_known():
    divisors = ElasticConfig(1, 8)
    assert [divisors.replicas_for(n) for n in range(9)] == [
        *(None, 1, 2, 2, 4, 4, 4, 4, 8)
    ]
    known = ElasticConfig(2, 8, global_batch=48)
    assert [known.replicas_for(n) for n in range(9)] == [
        *(None, None, 2, 3, 4, 4, 6, 6, 8)
    ]
    # 6 replicas of 3 devices would split 48 rows into 18 parts.
    assert known.replicas_for(7, replica_devices=3) == 4


@given(
    most=st.integers(1, 8),
    microbatches=st.integers(1, 4),
    rows=st.integers(1, 4),
    ranks=st.integers(1, 3),
    left=st.integers(1, 8),
    is_known=st.booleans(),
)
def test_each_number_of_replicas_keeps_the_batch_and_the_rows_of_a_microbatch(
    most, microbatches, rows, ranks, left, is_known
):
    batch = most * microbatches * ranks * rows
    config = ElasticConfig(1, most, global_batch=batch if is_known else None)
    replicas = config.replicas_for(left, replica_devices=ranks)
    assert replicas is not None and replicas <= min(left, most)
    some = Generation(1, replicas, most)
    count = some.microbatches_for(batch, microbatches, data_ranks=ranks)
    here, rest = divmod(batch, replicas * ranks * count)
    assert rest == 0 and 1 <= here <= rows
    if most % replicas == 0:
        assert count == microbatches * most // replicas and here == rows


def test_a_batch_that_replicas_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=facts("10", "3", "2", "4")):
        Generation(1, 3, 4).microbatches_for(10, data_ranks=2)
    with pytest.raises(ValueError, match=facts("num_microbatches=0", "1")):
        Generation().microbatches_for(8, 0)


def test_a_place_is_left_out_twice_as_long_with_each_death_there():
    places = Places(3).leave_out([1], now=10.0, rejoin_secs=4.0)
    assert places.usable(13.9) == (0, 2) and places.may_return(13.9)
    assert places.usable(14.0) == (0, 1, 2) and not places.may_return(14.0)
    again = places.leave_out([1, 2], now=20.0, rejoin_secs=4.0)
    assert again.usable(24.0) == (0, 2) and again.usable(28.0) == (0, 1, 2)
    often = Places(2, deaths={0: 2000, 1: 2000})
    assert often.leave_out([0], now=0.0, rejoin_secs=1.0).usable(1e9) == (1,)
    assert often.leave_out([0], now=0.0, rejoin_secs=0.0).usable(0.0) == (0, 1)
    never = Places(2).leave_out([0], now=0.0, rejoin_secs=math.inf)
    assert never.usable(1e9) == (1,) and not never.may_return(1e9)
    assert never.all_back().usable(0.0) == (0, 1)


def test_rows_of_a_step_that_the_launcher_does_not_expect_are_refused():
    some = Generation(1, 2, 4, global_batch=96)
    assert some.microbatches_for(96) == 2
    with pytest.raises(ValueError, match=facts("64", "--global-batch 96")):
        some.microbatches_for(64)
    with pytest.raises(ValueError, match=facts("global_batch=0", "1")):
        Generation(global_batch=0)


def test_all_numbers_out_of_range_are_named_at_once():
    with pytest.raises(ValueError, match=facts("4:2", "-1", "-2", "stop_secs 0")):
        ElasticConfig(4, 2, max_restarts=-1, rejoin_secs=-2, stop_secs=0)
    with pytest.raises(ValueError, match=facts("global_batch 6", "4 replicas")):
        ElasticConfig(1, 4, global_batch=6)
    with pytest.raises(ValueError, match=facts("6 processes", "4")):
        ElasticConfig(1, 4).processes_per_replica(6)
    assert parse_range("2:4") == (2, 4)


def test_a_generation_is_found_by_what_the_launcher_passes():
    some = Generation(2, 1, 4)
    assert generation(some.variables()) == some
    known = Generation(2, 1, 4, global_batch=96)
    assert generation(known.variables()) == known
    assert generation({}) is None
    with pytest.raises(ValueError, match=facts("FSDP_JAX_GLOBAL_BATCH=x")):
        generation(some.variables() | {"FSDP_JAX_GLOBAL_BATCH": "x"})
    partly = some.variables() | {"FSDP_JAX_REPLICAS": "x"}
    with pytest.raises(ValueError, match=facts("FSDP_JAX_REPLICAS=x")):
        generation(partly)
    with pytest.raises(ValueError, match=facts("5", "4")):
        Generation(0, 5, 4)


# Generations of programs that use no jax


PRELUDE = """
import os, sys, time, signal
rank, place = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
number = int(os.environ["FSDP_JAX_GENERATION"])
replicas = int(os.environ["FSDP_JAX_REPLICAS"])
print(number, replicas, place, flush=True)
"""
DIE = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(autouse=True)
def the_others_need_no_time_to_be_told(monkeypatch):
    monkeypatch.setattr("fsdp_jax.launch._processes._TOLD_SECS", 0.1)


class Ran:
    """An elastic job of a few lines of Python, and what it said."""

    def __init__(self, code: str, config: ElasticConfig, num_processes: int = 4):
        self.lines = defaultdict(list)
        command = [sys.executable, "-S", "-c", PRELUDE + code]
        self.job = ElasticProcesses(
            command,
            num_processes,
            config,
            line=lambda rank, text, is_error: self.lines[rank].append(text),
        )

    def run(self) -> int:
        return self.job.run()

    @property
    def places(self) -> dict[tuple[int, int], set[int]]:
        """Number and replicas of each generation -> places of its processes."""
        found = defaultdict(set)
        for rank in self.lines.keys() - {-1}:
            for text in self.lines[rank]:
                number, replicas, place = map(int, text.split())
                found[number, replicas].add(place)
        return dict(found)


def test_a_dead_place_is_left_out_and_ranks_close_up():
    ran = Ran(
        f"if number == 0:\n  time.sleep(0.2)\n  if place == 1: {DIE}\n  time.sleep(9)",
        ElasticConfig(1, 4, global_batch=12, rejoin_secs=math.inf),
    )
    assert ran.run() == 0
    assert ran.places == {(0, 4): {0, 1, 2, 3}, (1, 3): {0, 2, 3}}
    (died, starts) = ran.lines[-1]
    assert "process 1 (place 1, pid " in died and "SIGKILL" in died
    assert "generation 1" in starts and "3 of 4" in starts and "0, 2, 3" in starts


@pytest.mark.parametrize("dead", [{0, 2}, {2, 3}, {0, 1, 3}])
def test_all_places_that_die_at_once_are_left_out_also_that_of_rank_0(
    dead, tmp_path, monkeypatch
):
    # On a busy machine a process that was killed needs a while to end.
    monkeypatch.setattr("fsdp_jax.launch._processes._TOLD_SECS", 3)
    left = {0, 1, 2, 3} - dead
    ran = Ran(
        # One that survives kills the others between two lines, when all have started:
        # by a clock, a busy machine would let one die after the others were told.
        "if number: sys.exit()\n"
        f"if place in {dead}: os.symlink(str(os.getpid()), f'{tmp_path}/{{place}}')\n"
        f"elif place == {min(left)}:\n"
        f"  while len(os.listdir('{tmp_path}')) < {len(dead)}: time.sleep(0.01)\n"
        f"  pids = [int(os.readlink(f'{tmp_path}/{{place}}')) for place in {dead}]\n"
        "  for pid in pids: os.kill(pid, signal.SIGKILL)\n"
        "time.sleep(9)",
        ElasticConfig(1, 4, global_batch=12, rejoin_secs=math.inf),
    )
    assert ran.run() == 0
    assert ran.places == {(0, 4): {0, 1, 2, 3}, (1, len(left)): left}


def test_a_death_while_the_job_grows_back_leaves_the_place_out_again(monkeypatch):
    # A job grows after its first step, which this program has not.
    first_step = "fsdp_jax.launch._elastic_processes._FirstStep"
    monkeypatch.setattr(f"{first_step}.may_be_ended", lambda *_: True)
    ran = Ran(
        f"if number == 0:\n  time.sleep(0.2)\n  if place == 1: {DIE}\n"
        "if number == 1: time.sleep(9)\n"  # until place 1 may return
        f"if number == 2 and place == 1: {DIE}\n"
        "if number == 2: time.sleep(9)",
        ElasticConfig(1, 2, rejoin_secs=0.5),
        2,
    )
    assert ran.run() == 0
    assert list(ran.places)[:3] == [(0, 2), (1, 1), (2, 2)]
    assert ran.places[1, 1] == ran.places[3, 1] == {0}


def test_a_replica_of_two_processes_is_left_out_as_a_whole():
    ran = Ran(
        f"if number == 0:\n  time.sleep(0.2)\n  if place == 3: {DIE}\n  time.sleep(9)",
        ElasticConfig(1, 2, rejoin_secs=math.inf),
    )
    assert ran.run() == 0
    assert ran.places == {(0, 2): {0, 1, 2, 3}, (1, 1): {0, 1}}


def test_below_the_least_number_of_replicas_the_job_waits_or_ends():
    code = (
        f"if number == 0:\n  time.sleep(0.2)\n  if place == 0: {DIE}\n  time.sleep(9)"
    )
    waits = Ran(code, ElasticConfig(2, 2, rejoin_secs=0.5), 2)
    assert waits.run() == 0
    assert waits.places == {(0, 2): {0, 1}, (1, 2): {0, 1}}
    ends = Ran(code, ElasticConfig(2, 2, rejoin_secs=math.inf), 2)
    assert ends.run() == 128 + signal.SIGKILL
    assert "least of 2" in ends.lines[-1][-1]


def test_restarts_are_bounded_and_errors_before_a_step_are_not_repeated():
    dies = Ran(DIE, ElasticConfig(1, 1, max_restarts=2, rejoin_secs=0), 1)
    assert dies.run() == 128 + signal.SIGKILL
    assert sorted(dies.places) == [(0, 1), (1, 1), (2, 1)]
    wrong = Ran("sys.exit(2)", ElasticConfig(1, 1, rejoin_secs=0), 1)
    assert wrong.run() == 2
    assert sorted(wrong.places) == [(0, 1)]


def test_a_stopped_job_ends_with_the_status_of_sigterm_and_no_restart():
    ran = Ran("time.sleep(30)", ElasticConfig(1, 2, rejoin_secs=0), 2)
    stopper = threading.Timer(0.5, ran.job.stop)
    stopper.start()
    began = time.monotonic()
    assert ran.run() == 128 + signal.SIGTERM
    assert time.monotonic() - began < 20
    assert sorted(ran.places) == [(0, 2)]


def test_a_stop_that_comes_while_processes_start_keeps_its_signal(monkeypatch):
    ran = Ran("time.sleep(30)", ElasticConfig(1, 2, rejoin_secs=0), 2)

    class Stopped(Processes):
        def __enter__(self):
            ran.job.stop(signal.SIGKILL)
            return super().__enter__()

    monkeypatch.setattr("fsdp_jax.launch._elastic_processes.Processes", Stopped)
    assert ran.run() == 128 + signal.SIGKILL


def test_a_signal_handler_may_run_between_any_two_lines():
    ran = Ran("", ElasticConfig(1, 2), 2)
    interrupted = ("threading.py", "_elastic_processes.py")

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith(interrupted):
            return None
        if event == "line":
            ran.job.grow()  # as the handler of SIGUSR1 does
        return trace

    def run():
        sys.settrace(trace)
        statuses.append(ran.run())

    statuses = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert statuses == [0]


def end_together(code: str) -> tuple[int, frozenset[int]]:
    """Status of a job of three whose ends are seen at once, and who is blamed."""
    program = "import os, signal, sys\nrank = int(os.environ['RANK'])\n" + code
    command = [sys.executable, "-S", "-c", program]
    with Processes(command, 3, line=lambda *_: None) as processes:
        while None in processes.statuses:
            time.sleep(0.01)
        return processes.wait(20), processes.blamed


def test_survivors_that_abort_are_not_blamed():
    aborts = "else: os.abort()"
    killed = end_together(f"if rank == 2: {DIE}\n{aborts}")
    assert killed == (128 + signal.SIGKILL, {2})
    failed = end_together(f"if rank == 1: sys.exit(3)\n{aborts}")
    assert failed == (3, {1})
    alone = end_together("if rank == 1: os.abort()")
    assert alone == (128 + signal.SIGABRT, {1})
    both = end_together(f"if rank: {DIE}\n{aborts}")
    assert both == (128 + signal.SIGKILL, {1, 2})


def test_who_is_blamed_is_who_died_and_not_who_ended_as_an_effect():
    code = f"rank = int(os.environ['RANK'])\nif rank == 2: {DIE}\ntime.sleep(0.3); 1/0"
    command = [sys.executable, "-S", "-c", "import os, signal, time\n" + code]
    with Processes(command, 3, line=lambda *_: None) as processes:
        assert processes.wait(20) == 128 + signal.SIGKILL
    assert processes.blamed == {2}


def test_processes_that_are_killed_while_the_others_are_told_are_blamed(monkeypatch):
    monkeypatch.setattr("fsdp_jax.launch._processes._TOLD_SECS", 3)
    code = f"rank = int(os.environ['RANK'])\ntime.sleep((9, 0, 0.5)[rank]); {DIE}"
    command = [sys.executable, "-S", "-c", "import os, signal, time\n" + code]
    with Processes(command, 3, line=lambda *_: None) as processes:
        assert processes.wait(20) == 128 + signal.SIGKILL
    assert processes.blamed == {1, 2}


# The command


@pytest.mark.parametrize(
    "options, says",
    [
        (["--elastic", "0:4"], ["0:4"]),
        (["--elastic", "4:2"], ["4:2"]),
        (["--elastic", "four"], ["four", "MIN:MAX"]),
        (["--elastic", "1:3"], ["4 processes", "3"]),
        (["--elastic", "1:4", "--global-batch", "6"], ["6", "4 replicas"]),
        (["--max-restarts", "3"], ["--max-restarts 3", "--elastic"]),
    ],
)
def test_wrong_options_are_one_line_and_status_2(options, says, capsys):
    assert main(["launch", "--processes", "4", *options, "--", "true"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert all(part in line for part in says)


def test_on_several_nodes_of_slurm_it_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    words = ["launch", "--processes", "2", "--elastic", "1:2", "--", "true"]
    assert main(words) == 2
    assert "SLURM_JOB_NUM_NODES=2" in capsys.readouterr().err


COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from fsdp_jax.cli import main
sys.exit(main())
"""


def test_ctrl_c_ends_an_elastic_job_and_its_processes():
    waits = f"{PRELUDE}\nprint(os.getpid(), flush=True)\ntime.sleep(100)"
    words = ["launch", "--processes", "2", "--elastic", "1:2", "--"]
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words, sys.executable, "-S", "-c", waits],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        said = [launcher.stdout.readline().split() for _ in range(4)]
        pids = [int(words[1]) for words in said if len(words) == 2]
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(20) == 130
        assert "Traceback" not in launcher.stderr.read()
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
