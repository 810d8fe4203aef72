"""`fsdp-jax train` on preference pairs: two processes have the losses of one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.processes import Recorded

from fsdp_jax.cli import main

# The small Llama is written by transformers.
pytestmark = [pytest.mark.distributed, pytest.mark.torch]

# One pair more than a batch of eight: the reference's last batch is not full.
PAIRS = [
    {"prompt": f"{n}+{n}=", "chosen": f"{2 * n}.", "rejected": f"{2 * n + 1}, or so."}
    for n in range(9)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    lines = "".join(json.dumps(pair) + "\n" for pair in PAIRS)
    (folder / "pairs.jsonl").write_text(lines)
    assert main(["make-tiny-llama", str(folder / "llama")]) == 0
    return folder


def command(folder: Path, objective: str, name: str) -> list[str]:
    save = folder / f"{objective}-{name}"
    paths = {"data": folder / "pairs.jsonl", "save": save, "metrics": f"{save}.jsonl"}
    return ["train", *(f"--{option}={path}" for option, path in paths.items())]


def first(folder: Path, objective: str) -> list[str]:
    options = [f"--hf={folder / 'llama'}", f"--objective={objective}", "--lr=1e-3"]
    return [*options, "--batch=8", "--seq=32"]


def losses(folder: Path, objective: str, name: str) -> list[float]:
    lines = (folder / f"{objective}-{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def run_in_two(words: list[str]) -> str:
    job = Recorded([sys.executable, "-m", "fsdp_jax.cli", *words], 2)
    with job.processes as processes:
        assert processes.wait(240) == 0, job.said
    return job.said


@pytest.mark.parametrize("objective", ["dpo", "reward"])
def test_a_run_and_its_resumption_have_the_losses_of_one_process(objective, folder):
    ours, options = command(folder, objective, "two"), first(folder, objective)
    begun = run_in_two([*ours, *options, "--steps=2"])
    resumed = f"--resume={folder / f'{objective}-two'}"
    gone_on = run_in_two([*ours, resumed, "--steps=3"])
    assert main([*command(folder, objective, "one"), *options, "--steps=3"]) == 0

    found = losses(folder, objective, "two")
    assert found == pytest.approx(losses(folder, objective, "one"), rel=1e-5)
    assert len(found) == 3 and found[-1] < found[0]
    # The step has the reference's log-probabilities: they are not computed again.
    computes = "computing the log-probabilities of the reference"
    assert (computes in begun) == (objective == "dpo")
    assert computes not in gone_on
