"""A checkpoint follows from another one, or it is said what was changed in between."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from helpers.chains import moved, same, saved_again

import fsdp_jax as fsdp
from fsdp_jax.cli import main
from fsdp_jax.cli._chain import (
    KEY,
    Link,
    broken_links,
    read_link,
    stored_digest,
    stored_state,
)
from fsdp_jax.replay._bound import leaves_beyond

STEPS, EVERY = 4, 2


def train(*words: str) -> None:
    assert main(["train", *words]) == 0


@pytest.fixture(scope="module")
def run(llama, text, tmp_path_factory) -> Path:
    """A run of 4 steps with a chain, replayed at every other step."""
    folder = tmp_path_factory.mktemp("audited")
    train(
        *("--hf", str(llama), "--data", str(text), "--steps", str(STEPS)),
        *("--save", str(folder / "run"), "--save-every", str(EVERY), "--chain"),
        *("--metrics", str(folder / "metrics.jsonl"), "--seq", "16"),
    )
    return folder / "run"


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


def test_a_step_follows_from_the_one_that_it_was_made_from(run, capsys):
    assert main(["audit", str(run), "--from", "2", "--to", "4"]) == 0
    assert "step 4 follows from step 2" in capsys.readouterr().out


def test_a_tampered_step_is_found_by_its_link(run, tmp_path, capsys):
    path = copied(run, tmp_path)
    saved_again(path, STEPS, moved)
    assert main(["audit", str(path)]) == 1
    assert "step 4: its state" in capsys.readouterr().err


def test_a_tampered_step_with_a_link_of_its_own_is_found_by_the_replay(
    run, tmp_path, capsys
):
    path = copied(run, tmp_path)
    saved_again(path, STEPS, moved)
    link = read_link(path, STEPS)
    forged = {**vars(link), "state": stored_digest(path, STEPS)}
    saved_again(path, STEPS, same, **{KEY: forged})
    assert main(["audit", str(path)]) == 1
    assert "the replay has another state" in capsys.readouterr().err


@pytest.mark.long
def test_a_skipped_batch_is_found_by_the_replay(run, tmp_path, capsys):
    path = copied(run, tmp_path)
    shutil.rmtree(path / str(STEPS))
    data = fsdp.checkpoint.load_metadata(path, step=EVERY)["data"]
    skipped = {**data, "next_index": data["next_index"] + 1}
    whole = copied(path, tmp_path / "whole")
    saved_again(path, EVERY, same, data=skipped)
    train("--resume", str(path), "--metrics", str(tmp_path / "again.jsonl"))
    # The step before, as it was.
    shutil.rmtree(path / str(EVERY))
    shutil.copytree(whole / str(EVERY), path / str(EVERY))
    assert main(["audit", str(path)]) == 1
    told = capsys.readouterr().err
    assert "another state" in told and "another position" in told


def test_a_changed_learning_rate_is_found_by_the_links(run, tmp_path, capsys):
    path = copied(run, tmp_path)
    shutil.rmtree(path / str(STEPS))
    metrics = str(tmp_path / "again.jsonl")
    train("--resume", str(path), "--metrics", metrics, "--lr", "0.5")
    assert main(["audit", str(path)]) == 1
    assert "step 4: other options than step 2" in capsys.readouterr().err


def test_a_step_whose_predecessor_was_replaced_is_found():
    first = Link(1, "a", {}, "t", "c", "p", "o", None)
    second = Link(2, "b", {}, "t", "c", "p", "o", first.digest)
    assert broken_links({1: first, 2: second}) == []
    # A step between them that was removed.
    third = Link(3, "c", {}, "t", "c", "p", "o", second.digest, second.step)
    assert broken_links({1: first, 2: second, 3: third}) == []
    assert broken_links({1: first, 3: third}) == []
    assert broken_links({2: dataclasses.replace(second, state="x"), 3: third})
    other = Link(1, "x", {}, "t", "c", "p", "o", None)
    assert broken_links({1: other, 2: second}) == [
        "step 2: not made from step 1 as it is"
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--check-replay", "0"], ["--check-replay 0"]),
        (["--replay-rtol", "1e-3"], ["--replay-rtol 0.001", "--check-replay N"]),
        (["--check-replay", "2", "--dp-shard", "1"], ["1 device(s)"]),
    ],
)
def test_a_replay_that_cannot_be_is_refused(
    words, named, llama, text, tmp_path, capsys
):
    given = ["--hf", str(llama), "--data", str(text), "--steps", "2", *words]
    if "--dp-shard" in words:
        given += ["--devices", "1"]
    assert main(["train", *given, "--save", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert all(name in told for name in named)


@pytest.mark.long
def test_a_run_that_is_replayed_trains_as_one_that_is_not_and_is_audited(
    run, llama, text, tmp_path
):
    again = tmp_path / "run"
    train(
        *("--hf", str(llama), "--data", str(text), "--steps", str(STEPS)),
        *("--save", str(again), "--save-every", str(EVERY), "--seq", "16"),
        *("--metrics", str(tmp_path / "metrics.jsonl")),
        *("--chain", "--check-replay", "2"),
    )
    # The program of a replayed step also records, and so rounds otherwise.
    trained, there = stored_state(again, STEPS), stored_state(run, STEPS)
    assert not leaves_beyond(trained, there, 1e-5)
    assert leaves_beyond(trained, stored_state(run, EVERY), 1e-5)
    # Bit for bit, since an audit replays the same steps.
    assert main(["audit", str(again)]) == 0
