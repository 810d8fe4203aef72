"""Text from the command line: the same on any number of devices."""

import json

import pytest

from fsdp_jax.cli import main

PROMPTS = ["7 squared", "1", "12 squared is "]


def generated(capsys, model, *options, prompts=PROMPTS):
    argv = ["generate", str(model), "--prompt", *prompts, "--json"]
    assert main([*argv, "--max-new-tokens", "12", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_eight_devices_write_what_one_does(trained, capsys):
    eight = generated(capsys, trained.save)
    assert [row["prompt"] for row in eight] == PROMPTS
    assert eight == generated(capsys, trained.save, "--devices", "1")
    assert eight != generated(capsys, trained.save, "--step", "2")


def test_draws_depend_on_the_seed_alone(trained, capsys):
    draw = ["--temperature", "0.9", "--top-p", "0.95"]
    eight = generated(capsys, trained.save, *draw)
    assert eight == generated(capsys, trained.save, *draw, "--devices", "2")
    assert eight != generated(capsys, trained.save, *draw, "--seed", "1")


def test_a_text_ends_at_the_models_own_token(write_llama, tmp_path, capsys):
    every = tuple(range(0, 256))
    model = write_llama(tmp_path / "model", eos_token_id=every)
    rows = generated(capsys, model)
    assert all(row["ended"] and row["text"] == "" for row in rows)


def test_for_reading_the_prompt_comes_first(llama, capsys):
    argv = ["generate", str(llama), "--prompt", "one", "--max-new-tokens", "2"]
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("one")


@pytest.mark.parametrize(
    "options, says",
    [
        (["--max-new-tokens", "0", "--seed", "-1"], "--seed -1 must be at least 0"),
        (["--top-k", "3"], "top_k would do nothing"),
        (["--tokenizer", "model"], "needs a tokenizer.json"),
        (["--prompt", "a", ""], "--prompt '': no tokens"),
    ],
)
def test_what_cannot_be_generated_is_refused(llama, capsys, options, says):
    assert main(["generate", str(llama), "--prompt", "a", *options]) == 2
    assert says in capsys.readouterr().err
