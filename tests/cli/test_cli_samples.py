"""`--sample`: texts written while training are those of `fsdp-jax generate`."""

import json

import pytest

from fsdp_jax.cli import main


@pytest.fixture
def argv(llama, text, tmp_path):
    given = ["train", "--hf", str(llama), "--data", str(text), "--seq", "16"]
    return [*given, "--steps", "3", "--save", str(tmp_path / "run")]


def test_a_sample_is_what_the_saved_step_generates(argv, tmp_path, fake_step, capsys):
    fake_step(5, 4, 3)
    options = ["--sample", "one", "three", "--sample-every", "2"]
    assert main([*argv, *options, "--sample-tokens", "5"]) == 0
    told = capsys.readouterr().err.splitlines()
    samples = [line for line in told if line.startswith("sample after")]
    steps = [line.partition(":")[0] for line in samples]
    assert steps == [f"sample after step {n}" for n in (2, 2, 3, 3)]
    argv = ["generate", str(tmp_path / "run"), "--prompt", "one", "three", "--json"]
    assert main([*argv, "--max-new-tokens", "5"]) == 0
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    last = [json.loads(line.partition(": ")[2]) for line in samples[2:]]
    assert last == [row["prompt"] + row["text"] for row in rows]


@pytest.mark.parametrize(
    "options, says",
    [
        (["--sample-every", "2"], "--sample PROMPT"),
        (["--sample", "a", "--sample-tokens", "0"], "--sample-tokens 0"),
        (["--sample", "a", "--tp", "2"], "tp=2"),
        (["--sample", ""], "--sample ''"),
        (["--sample", "a", "--sample-chat"], "'a'"),
    ],
)
def test_samples_that_cannot_be_made_are_refused(argv, options, says, capsys, tmp_path):
    assert main([*argv, *options]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run" / "3").exists()
