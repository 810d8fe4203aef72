"""`fsdp-jax train` on four processes with two devices each is that on one."""

from __future__ import annotations

import json
import sys

import pytest
from helpers.processes import Recorded

import fsdp_jax as fsdp
from fsdp_jax.cli import main

pytestmark = pytest.mark.distributed


def test_train_on_four_processes_is_train_on_one(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("So it goes on, line by line. " * 200)
    assert main(["make-tiny-llama", str(tmp_path / "llama")]) == 0
    command = ["train", "--hf", str(tmp_path / "llama"), "--data", str(text)]
    command += ["--steps", "2", "--batch", "8", "--seq", "16", "--save-every", "1"]

    def saved_to(name: str) -> list[str]:
        metrics = str(tmp_path / f"{name}.jsonl")
        return [*command, "--save", str(tmp_path / name), "--metrics", metrics]

    four = Recorded([sys.executable, "-m", "fsdp_jax.cli", *saved_to("four")], 4)
    with four.processes as processes:
        assert processes.wait(240) == 0, four.said
    assert main(saved_to("one")) == 0
    losses = {
        name: [
            json.loads(line)["loss"]
            for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
        ]
        for name in ("one", "four")
    }
    assert len(losses["four"]) == 2  # one process writes them
    assert losses["four"] == pytest.approx(losses["one"], rel=1e-5)
    assert fsdp.verify(tmp_path / "four").step == 2
    said = [line for lines in four.lines.values() for line in lines]
    assert sum("is now in" in line for line in said) == 1, four.said
