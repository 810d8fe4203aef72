"""`train --objective dpo`: pairs of answers, and the losses of the Python API."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import dpo
import numpy as np
import pytest
from helpers.errors import facts
from helpers.tiny_tokenizer import write_tokenizer

from fsdp_jax.cli import main
from fsdp_jax.cli._chat_template import ChatTemplate
from fsdp_jax.cli._preference_records import pair_records
from fsdp_jax.cli._reference_model import read_reference, write_reference

PAIRS = [
    {
        "prompt": f"{n} plus {n} is",
        "chosen": f" {2 * n}.",
        "rejected": f" {2 * n + 1}, or so.",
    }
    for n in range(8)
]
# The CLI's batch has the pairs in another order, and sums them in it, in float32.
ANOTHER_ORDER = 2e-5
COMMON = ["--seq", "32", "--batch", "8", "--clip", "1", "--weight-decay", "0"]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write(file: Path, records) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", PAIRS)


@pytest.fixture(scope="module")
def model(tmp_path_factory, write_llama) -> Path:
    folder = tmp_path_factory.mktemp("dpo") / "model"
    write_llama(folder, vocab_size=264, eos_token_id=256)
    write_tokenizer(folder, ["</s>"])
    return folder


def train(model: Path, pairs: Path, save: Path, *options: str) -> int:
    argv = ["train", "--hf", str(model), "--data", str(pairs), "--save", str(save)]
    return main([*argv, "--objective", "dpo", *COMMON, *options])


def metrics(save: Path) -> list[dict[str, float]]:
    return [json.loads(x) for x in save.with_suffix(".jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(model, pairs, tmp_path_factory) -> Path:
    """Three steps, of which the second is saved too."""
    save = tmp_path_factory.mktemp("run") / "save"
    lines = ["--metrics", str(save.with_suffix(".jsonl")), "--save-every", "2"]
    schedule = ["--lr", "1e-2", "--lr-schedule", "linear"]
    assert train(model, pairs, save, "--steps", "3", *schedule, *lines) == 0
    return save


def test_the_losses_are_those_of_the_python_api(run, model, pairs, tmp_path):
    options = dpo.Options(model, pairs, tmp_path, steps=3, seq=32, lr=1e-2)
    ours = metrics(run)
    theirs = dpo.train(options)
    for name, other in (("loss", "loss"), ("reward_margin", "margin")):
        np.testing.assert_allclose(
            [step[name] for step in ours],
            [step[other] for step in theirs],
            rtol=ANOTHER_ORDER,
            atol=ANOTHER_ORDER,
        )
    assert ours[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert ours[2]["reward_accuracy"] == 1 and ours[2]["loss"] < 0.6


def test_a_resumed_run_keeps_its_reference_on_another_mesh(run, pairs, tmp_path):
    save = tmp_path / "again"
    argv = ["train", "--resume", str(run), "--resume-step", "2", "--save", str(save)]
    lines = ["--metrics", str(save.with_suffix(".jsonl")), "--dp-outer", "2"]
    assert main([*argv, "--data", str(pairs), "--steps", "3", *lines]) == 0
    (again,) = metrics(save)
    assert again["loss"] == pytest.approx(metrics(run)[2]["loss"], rel=ANOTHER_ORDER)


def test_a_run_goes_on_in_its_directory_with_its_options(run, pairs, tmp_path):
    save = tmp_path / "copy"
    shutil.copytree(run, save)
    lines = ["--metrics", str(save.with_suffix(".jsonl"))]
    argv = ["train", "--resume", str(save), "--data", str(pairs), *lines]
    assert main([*argv, "--steps", "4"]) == 0
    (fourth,) = metrics(save)
    assert fourth["step"] == 4


def test_both_answers_of_a_pair_are_shown(model, pairs, capsys):
    argv = ["data", str(model), "--data", str(pairs), "--objective", "dpo"]
    assert main([*argv, "--seq", "32", "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "8 pairs" in shown and "8 pairs of rows of 32 tokens" in shown
    pair = next(x for x in PAIRS if x["prompt"] in shown)
    for name in ("chosen", "rejected"):
        assert f"{name}\n{pair['prompt']}[{pair[name]}</s>]" in shown


def test_the_prompt_of_texts_is_what_both_begin_with():
    explicit = pair_records(PAIRS[3], None)
    joined = {name: "3 plus 3 is" + PAIRS[3][name] for name in ("chosen", "rejected")}
    assert pair_records(joined, None) == explicit
    assert [x.text[slice(*x.spans[0])] for x in explicit] == [" 6.", " 7, or so."]


@pytest.mark.torch  # transformers renders templates.
def test_prompts_of_messages_are_found_in_each_form():
    template = ChatTemplate("{% for m in messages %}<{{m.content}}>{% endfor %}", {})
    ask = message("user", "Q")
    chosen, rejected = message("assistant", "A"), message("assistant", "B")
    forms = [
        {"prompt": [ask], "chosen": [chosen], "rejected": [rejected]},
        {"chosen": [ask, chosen], "rejected": [ask, rejected]},
        {"prompt": "Q", "chosen": [ask, chosen], "rejected": [ask, rejected]},
    ]
    found = [pair_records(form, template) for form in forms]
    assert found[0] == found[1] == found[2]
    assert [x.text for x in found[0]] == ["<Q><A>", "<Q><B>"]
    assert [x.text[slice(*x.spans[0])] for x in found[0]] == ["<A>", "<B>"]
    wrong = {"prompt": "?", "chosen": [ask, chosen], "rejected": [ask, rejected]}
    with pytest.raises(ValueError, match=facts("prompt", "chosen", "rejected")):
        pair_records(wrong, template)


def test_pairs_that_are_equal_up_to_the_end_of_a_row_are_left_out_and_counted(
    model, tmp_path, capsys
):
    alike = {"prompt": "?", "chosen": "a" * 50, "rejected": "a" * 50 + "b"}
    argv = ["data", str(model), "--objective", "dpo", "--seq", "32", "--data"]
    file = write(tmp_path / "some.jsonl", [*PAIRS, alike, alike])
    assert main([*argv, str(file)]) == 0
    shown = capsys.readouterr().out
    assert "10 pairs" in shown and "2 equal in their first 33 dropped" in shown
    assert "8 pairs of rows" in shown
    assert main([*argv, str(write(tmp_path / "all.jsonl", [alike]))]) == 2
    assert re.search(facts("--data", 1, "--seq"), capsys.readouterr().err)


@pytest.mark.parametrize(
    "record, named",
    [
        ({"text": "a"}, ["text", "chosen", "rejected", "--objective"]),
        ({"chosen": "a", "rejected": "a"}, ["chosen", "rejected"]),
        ({"prompt": 1, "chosen": "a", "rejected": "b"}, ["prompt"]),
        ({"chosen": "a", "rejected": ["b"]}, ["rejected"]),
    ],
)
def test_rows_that_are_no_pairs_are_named(record, named, model, tmp_path, capsys):
    file = write(tmp_path / "bad.jsonl", [PAIRS[0], record])
    assert train(model, file, tmp_path / "save", "--steps", "1") == 2
    told = capsys.readouterr().err
    assert all(name in told for name in (*named, "1 of 2", "line 2", str(file)))
    assert not (tmp_path / "save").exists()


@pytest.mark.parametrize(
    "options, named",
    [
        (["--cp", "2"], ["cp=2"]),
        (["--eval-data", "PAIRS"], ["--eval-data"]),
        (["--rows", "pad"], ["--rows pad"]),
        (["--dpo-beta", "0"], ["--dpo-beta 0"]),
        (["--label-smoothing", "0.5"], ["--label-smoothing 0.5"]),
        (["--z-loss", "1e-4"], ["--z-loss"]),
        (["--train-on", "all"], ["--train-on all"]),
        (
            ["--objective", "sft", "--dpo-beta", "1"],
            ["--dpo-beta 1", "--objective dpo"],
        ),
        (["--objective", "sft"], ["line 1", "--objective dpo"]),
    ],
)
def test_what_dpo_has_not_is_refused(options, named, model, pairs, tmp_path, capsys):
    given = [str(pairs) if x == "PAIRS" else x for x in options]
    assert train(model, pairs, tmp_path / "save", "--steps", "1", *given) == 2
    told = capsys.readouterr().err
    assert all(name in told for name in named)
    assert not (tmp_path / "save").exists()


def test_a_reference_of_other_data_is_not_read(tmp_path):
    parts = [np.zeros((3, 2), np.float32), np.ones((1, 2), np.float32)]
    write_reference(tmp_path, "a", parts)
    found = read_reference(tmp_path, "a")
    assert found is not None
    for one, other in zip(found, parts, strict=True):
        np.testing.assert_array_equal(one, other)
    assert read_reference(tmp_path, "b") is None
    write_reference(tmp_path, "a", parts, "train --hf one")
    assert read_reference(tmp_path, "a") is not None
    assert read_reference(tmp_path, "a", "train --hf one") is not None
    assert read_reference(tmp_path, "a", "train --hf other") is None
