"""A run described in a file is the run of the same options on the command line."""

import json

import jsonschema
import pytest
import yaml

import fsdp_jax as fsdp
from fsdp_jax.cli import main, parse
from fsdp_jax.cli._option_schema import schema_of
from fsdp_jax.cli.commands._train import Train

RUN = {
    "data": ["a.jsonl", "b.jsonl"],
    "steps": 7,
    "save": "runs/a",
    "start": {"hf": "model", "ignore_field": ["x", "y"]},
    "optimizer": {"lr": "1e-3", "lr_schedule": "cosine", "warmup": 2},
    "precision": {"fused_loss": True},
    "mesh": {"dp_shard": -1, "tp": 2},
}
WORDS = (
    "--data a.jsonl b.jsonl --steps 7 --save runs/a --hf model --ignore-field x "
    "--ignore-field y --lr 1e-3 --lr-schedule cosine --warmup 2 --fused-loss --tp 2"
).split()


def written(path, values=RUN, **changes):
    path.write_text(yaml.safe_dump({**values, **changes}))
    return str(path)


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


def test_a_file_is_the_command_of_its_options(tmp_path):
    assert parse(["train", written(tmp_path / "run.yaml")]) == parse(["train", *WORDS])
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    assert parse(["train", str(tmp_path / "run.json")]) == parse(["train", *WORDS])


def test_options_of_the_command_line_replace_those_of_the_file(tmp_path):
    file = written(tmp_path / "run.yaml")
    sets = ["--set", "optimizer.lr=1e-4", "--set=steps=9"]
    typed = ["--data", "c.txt", "--no-fused-loss", "--tp=4", "--ignore-field", "z"]
    given = parse(["train", file, *sets, *typed])
    assert (given.optimizer.lr, given.steps, given.optimizer.warmup) == (1e-4, 9, 2)
    assert ([str(path) for path in given.data], given.mesh.tp) == (["c.txt"], 4)
    assert given.precision.fused_loss is False
    assert given.start.ignore_field == ("z",)


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"lr": 0.1, "optmizer": {}}, ["lr", "optimizer.lr", "optmizer", "optimizer"]),
        ({"optimizer": {"lrr": 0.1}}, ["optimizer.lrr", "optimizer.lr"]),
        ({"steps": "many", "mesh": {"tp": 2.5}}, ["steps", "many", "mesh.tp", 2.5]),
        ({"optimizer": {"optimizer": "sgd"}}, ["optimizer.optimizer", "adamw"]),
        ({"precision": {"fused_loss": "yes"}}, ["precision.fused_loss", "boolean"]),
        ({"data": ["a", 3], "mesh": 8}, ["data[1]", "mesh", 8]),
    ],
)
def test_what_is_wrong_with_a_file_is_said_at_once(tmp_path, capsys, changes, names):
    assert main(["train", written(tmp_path / "run.yaml", **changes)]) == 2
    told = said(capsys)
    assert "run.yaml" in told
    for name in names:
        assert str(name) in told


@pytest.mark.parametrize(
    "content", ["steps: 1\nsteps: 2\n", "a: [", "- steps", "mesh: {tp: 1, tp: 2}"]
)
def test_a_file_that_holds_no_options_is_refused(tmp_path, capsys, content):
    (tmp_path / "run.yaml").write_text(content)
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    assert "run.yaml" in said(capsys)


@pytest.mark.parametrize("text", ["lr", "optimizer.lrr=1", "a.b.c=1", "mesh.tp=two"])
def test_a_value_that_cannot_be_set_is_refused(tmp_path, capsys, text):
    file = written(tmp_path / "run.yaml")
    assert main(["train", file, "--set", text]) == 2
    assert f"--set {text}" in said(capsys)


def test_a_file_that_is_not_there_is_named(capsys):
    assert main(["train", "nowhere/run.yaml"]) == 2
    assert "'nowhere/run.yaml'" in said(capsys)


def test_the_schema_describes_each_option(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({**RUN, "optimizer": {"lr": 1e-3}}, schema)
    for wrong in ({"lr": 1}, {"optimizer": {"lrr": 1}}, {"steps": "2"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**RUN, **wrong}, schema)
    options = [
        option
        for section in schema["properties"].values()
        for option in section.get("properties", {}).values()
    ]
    assert len(options) > 60
    assert all(option["description"] for option in options)


@pytest.fixture
def begun(llama, text, tmp_path, fake_step):
    """The directory of a run that was started from a file and has done 2 steps."""
    values = {
        "data": str(text),
        "steps": 2,
        "save": str(tmp_path / "first"),
        "start": {"hf": str(llama)},
        "batches": {"batch": 8, "seq": 16, "seed": 3},
        "optimizer": {"lr": 1e-3, "lr_schedule": "linear", "clip": 1.0},
        "logs": {"metrics": str(tmp_path / "metrics.jsonl")},
    }
    fake_step(5, 4)
    assert main(["train", written(tmp_path / "run.yaml", values)]) == 0
    return tmp_path / "first"


def test_the_file_of_a_run_has_all_its_options_and_repeats_it(begun, fake_step):
    values = yaml.safe_load((begun / "run.yaml").read_text())
    jsonschema.validate(values, schema_of(Train))
    assert values["optimizer"]["lr_steps"] == 2  # which the file did not give
    assert values["optimizer"]["b1"] == 0.9
    fake_step(5, 4)
    again = begun.parent / "again"
    argv = ["train", str(begun / "run.yaml"), "--save", str(again)]
    assert main([*argv, "--metrics", str(begun.parent / "again.jsonl")]) == 0
    first, second = map(fsdp.checkpoint.load_metadata, (begun, again))
    assert first["train"] == second["train"]


def test_a_run_goes_on_with_nothing_but_its_directory(begun, fake_step, capsys):
    assert main(["train", "--resume", str(begun)]) == 2  # All steps are done.
    assert "--steps 2" in said(capsys)
    fake_step(3)
    assert main(["train", "--resume", str(begun), "--steps", "3"]) == 0
    assert fsdp.latest_step(begun) == 3
    first, last = (fsdp.checkpoint.load_metadata(begun, step=n) for n in (2, 3))
    assert first["train"] == last["train"]
    lines = (begun.parent / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [5, 4, 3]


def test_a_run_of_relative_paths_goes_on_from_any_directory(
    llama, text, tmp_path, fake_step, capsys, monkeypatch
):
    (tmp_path / "model").symlink_to(llama)
    monkeypatch.chdir(tmp_path)
    fake_step(5)
    argv = ["train", "--hf", "model", "--data", str(text), "--steps", "1"]
    (tmp_path / "deep").mkdir()
    metrics = "deep/../run.jsonl"
    argv += ["--save", "run", "--metrics", metrics, "--batch", "8", "--seq", "16"]
    assert main(argv) == 0
    values = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert values["start"]["hf"] == str(tmp_path / "model")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fake_step(4)
    assert main(["train", "--resume", "../run", "--steps", "2"]) == 0
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [5, 4]
    # Another command is told what of it is another, and no more.
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert main([*argv, "--lr", "0.5"]) == 2
    told = said(capsys)
    assert "lr not given there, 0.5 here" in told and "seq" not in told
    # The model is in the checkpoint: the command goes on without the first one.
    (tmp_path / "model").unlink()
    fake_step(3)
    assert main([word if word != "1" else "3" for word in argv]) == 0


def test_metrics_of_another_run_are_not_written_over(begun, capsys):
    other = begun.parent / "other.jsonl"
    other.write_text("{}\n")
    argv = ["train", "--resume", str(begun), "--steps", "3", "--metrics", str(other)]
    assert main(argv) == 2
    assert str(other) in said(capsys)
    assert other.read_text() == "{}\n"


def test_a_run_that_is_not_there_is_named_before_its_missing_options(tmp_path, capsys):
    nowhere = str(tmp_path / "nowhere")
    for given in ([], ["--data", "text.txt"]):
        assert main(["train", "--resume", nowhere, "--steps", "3", *given]) == 2
        told = said(capsys)
        assert f"--resume '{nowhere}'" in told and "--save" in told
