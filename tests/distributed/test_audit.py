"""A run of two processes is audited by two and by one, and what is wrong is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import pytest
from helpers.chains import moved, same, saved_again
from helpers.processes import run_processes

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._multihost import exchange
from fsdp_jax.cli import main, parse
from fsdp_jax.cli._chain import KEY, read_link, stored_digest
from fsdp_jax.cli._errors import CheckFailed

# The small Llama is written by transformers.
pytestmark = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.long]

FIRST, LAST = 1, 2
# Sums of eight float32 gradients in another order, divided by their root by Adam; a
# tampered norm differs by 1e-3.
RTOL = 2e-4


def train(folder: Path, name: str, *words: str) -> None:
    paths = ["--save", str(folder / name), "--metrics", str(folder / f"{name}.jsonl")]
    options = ["--steps", str(LAST), "--save-every", "1", "--chain"]
    parse(["train", *paths, *options, *words]).run()


def new_run(folder: Path) -> list[str]:
    source = ["--hf", str(folder / "llama"), "--data", str(folder / "text")]
    return [*source, "--batch", "8", "--seq", "8"]


def told(path: Path, *words: str) -> str:
    """What an audit finds wrong; "" for nothing."""
    try:
        parse(["audit", str(path), *words]).run()
    except CheckFailed as error:
        return str(error)
    return ""


def copied(folder: Path, name: str, *, is_last_kept: bool) -> Path:
    if jax.process_index() == 0:
        shutil.copytree(folder / "run", folder / name)
        if not is_last_kept:
            shutil.rmtree(folder / name / str(LAST))
    exchange(None)
    return folder / name


def scenario(given: str) -> dict[str, str]:
    folder = Path(given)
    train(folder, "run", *new_run(folder))
    tampered = copied(folder, "tampered", is_last_kept=True)
    saved_again(tampered, LAST, moved)
    forged = {**vars(read_link(tampered, LAST)), "state": stored_digest(tampered, LAST)}
    found = {"run": told(folder / "run"), "tampered": told(tampered)}
    saved_again(tampered, LAST, same, **{KEY: forged})
    found["forged"] = told(tampered)
    rate = copied(folder, "rate", is_last_kept=False)
    train(folder, "rate", "--resume", str(rate), "--lr", "0.5")
    found["rate"] = told(rate)
    skipped = copied(folder, "skipped", is_last_kept=False)
    data = fsdp.checkpoint.load_metadata(skipped, step=FIRST)["data"]
    later = data | {"next_index": data["next_index"] + 1}
    saved_again(skipped, FIRST, same, data=later)
    train(folder, "skipped", "--resume", str(skipped))
    if jax.process_index() == 0:  # The step before, as it was.
        shutil.rmtree(skipped / str(FIRST))
        shutil.copytree(folder / "run" / str(FIRST), skipped / str(FIRST))
    exchange(None)
    return found | {"skipped": told(skipped)}


def test_an_audit_by_two_processes_and_by_one_finds_what_is_wrong(tmp_path):
    (tmp_path / "text").write_text("So it goes on, line by line. " * 50)
    assert main(["make-tiny-llama", str(tmp_path / "llama")]) == 0
    first, second = run_processes(scenario, 2, str(tmp_path), devices=4)
    assert first == second
    assert first["run"] == ""
    assert "step 2: its state is not the one of its link" in first["tampered"]
    assert "the replay has another state" in first["forged"]
    assert "step 2: other options than step 1" in first["rate"]
    assert "another state" in first["skipped"]
    assert "another position" in first["skipped"]

    # One process: the same digests of what is stored; sums in another order.
    assert told(tmp_path / "run", "--rtol", str(RTOL)) == ""
    assert "the replay has another state" in told(tmp_path / "run")
    assert "beyond" in told(tmp_path / "tampered", "--rtol", str(RTOL))
    train(tmp_path, "alone", *new_run(tmp_path))
    alone, two = (read_link(tmp_path / name, LAST) for name in ("alone", "run"))
    for field in ("position", "tokens", "code", "plan", "options"):
        assert getattr(alone, field) == getattr(two, field)
