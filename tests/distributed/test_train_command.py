"""`fsdp-jax train` on four processes with two devices each is that on one.

Also after one of them was killed in mid-step, and the same command went on; by itself
where the launcher is elastic.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers  # comes with transformers
from helpers.processes import ENVIRONMENT, Recorded

import fsdp_jax as fsdp
from fsdp_jax.cli import main

# The small Llama is written by transformers.
pytestmark = [pytest.mark.distributed, pytest.mark.torch]

STEPS, VICTIM = 4, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    (folder / "text").write_text("So it goes on, line by line. " * 200)
    assert main(["make-tiny-llama", str(folder / "llama")]) == 0
    words = tokenizers.models.WordLevel(
        {word: n for n, word in enumerate(["?", *"So it goes on line by . ,".split()])},
        unk_token="?",
    )
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "llama" / "tokenizer.json"))
    return folder


def command(folder: Path, name: str) -> list[str]:
    paths = {"hf": "llama", "data": "text", "save": name, "metrics": f"{name}.jsonl"}
    options = [f"--{option}={folder / path}" for option, path in paths.items()]
    options += [f"--steps={STEPS}", "--batch=8", "--seq=16", "--save-every=1"]
    return ["train", *options]


def start(folder: Path) -> Recorded:
    return Recorded([sys.executable, "-m", "fsdp_jax.cli", *command(folder, "four")], 4)


def losses(folder: Path, name: str) -> list[tuple[int, float]]:
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [(each["step"], each["loss"]) for each in map(json.loads, lines)]


@pytest.fixture(scope="module")
def killed(folder) -> Recorded:
    """A job, one process of which was killed in the step after the first commit."""
    job = start(folder)
    with job.processes as processes:
        end = time.monotonic() + 200
        while fsdp.latest_step(folder / "four") is None:
            assert processes.statuses == [None] * 4 and time.monotonic() < end, job.said
            time.sleep(0.01)
        os.kill(processes.pids[VICTIM], signal.SIGKILL)
        began = time.monotonic()
        assert processes.wait(60) == 128 + signal.SIGKILL, job.said
        assert time.monotonic() - began < 60
    return job


def test_the_others_end_and_name_the_process_that_was_killed(killed):
    for rank in {0, 1, 2, 3} - {VICTIM}:
        said = "\n".join(killed.lines[rank])
        assert re.search(
            r"stops: process 2 \(.*(killed|SIGKILL).*, in step \d", said
        ), killed.said


def test_the_same_command_goes_on_and_ends_as_one_process_does(killed, folder):
    assert losses(folder, "four")[-1][0] < STEPS  # it was killed before the end
    again = start(folder)
    with again.processes as processes:
        assert processes.wait(240) == 0, again.said
    assert main(command(folder, "one")) == 0
    steps, expected = zip(*losses(folder, "one"), strict=True)
    assert [step for step, _ in losses(folder, "four")] == list(steps) == [1, 2, 3, 4]
    found = [loss for _, loss in losses(folder, "four")]
    assert found == pytest.approx(expected, rel=1e-5)
    assert fsdp.checkpoint.verify(folder / "four").step == STEPS
    said = [line for lines in again.lines.values() for line in lines]
    assert sum("is now in" in line for line in said) == 1, again.said
    # The first process tokenized; alone, none has to be told.
    assert (folder / "four" / "fsdp-jax-tokens.npy").is_file()
    assert not (folder / "one" / "fsdp-jax-tokens.npy").exists()


class Launcher:
    """`fsdp-jax launch`, and what it and its processes write."""

    def __init__(self, arguments: list[str], output: Path):
        self._output = output
        with output.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fsdp_jax.cli", "launch", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT,
            )

    @property
    def said(self) -> str:
        return self._output.read_text()

    def await_that(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 200
        while not holds():
            assert self.process.poll() is None and time.monotonic() < end, self.said
            time.sleep(0.01)

    def pids(self) -> list[int]:
        """Its processes, in order of their start."""
        command = ["ps", "-A", "-o", "pid=", "-o", "ppid="]
        table = subprocess.run(command, capture_output=True, text=True, check=True)
        rows = [map(int, line.split()) for line in table.stdout.splitlines()]
        return sorted(pid for pid, parent in rows if parent == self.process.pid)


@pytest.mark.long
def test_an_elastic_launch_goes_on_with_one_process_and_grows_back(folder):
    length = ["--steps=60", "--save-every=60"]  # the last of an option counts
    train = [*command(folder, "elastic"), *length, "--dp-outer=2"]
    options = ["--processes=2", "--devices-per-process=1", "--elastic=1:2"]
    options += ["--rejoin-secs=inf", "--", sys.executable, "-m", "fsdp_jax.cli", *train]
    local = f"--local-checkpoints={folder / 'local'}"
    launcher = Launcher([*options, local], folder / "elastic.txt")
    metrics = folder / "elastic.jsonl"
    try:
        launcher.await_that(
            lambda: metrics.exists() and metrics.read_text().count("\n") >= 3
        )
        os.kill(launcher.pids()[1], signal.SIGKILL)
        launcher.await_that(lambda: "generation 1 starts" in launcher.said)
        launcher.process.send_signal(signal.SIGUSR1)
        assert launcher.process.wait(200) == 0, launcher.said
    finally:
        launcher.process.terminate()
        launcher.process.wait(60)
    events = ["was ended by SIGKILL", "with 1 of 2 replicas, at places 0"]
    for event in [*events, "with 2 of 2 replicas, at places 0, 1"]:
        assert event in launcher.said
    assert main([*command(folder, "alone"), *length]) == 0
    steps, expected = zip(*losses(folder, "alone"), strict=True)
    assert [step for step, _ in losses(folder, "elastic")] == list(steps)
    found = [loss for _, loss in losses(folder, "elastic")]
    # float32 sums over other devices and microbatches.
    assert found == pytest.approx(expected, rel=1e-5)
    assert fsdp.checkpoint.verify(folder / "elastic").step == 60
