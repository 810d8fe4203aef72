"""`--log-to`: metrics reach the logs of others, with the options of the run."""

import struct
from pathlib import Path

import pytest
from helpers.errors import facts
from tensorboardX.proto.event_pb2 import Event

from fsdp_jax.cli import main
from fsdp_jax.cli._log_writers import check_writers, logged_run, open_writers
from fsdp_jax.cli._metrics import StepMetrics


def events(directory: Path) -> list[Event]:
    """What TensorBoard reads: records of length, checksum, event and checksum."""
    found = []
    for file in sorted(directory.glob("events.*")):
        content = file.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
    return found


def scalars(directory: Path, name: str) -> dict[int, float]:
    return {
        event.step: value.simple_value
        for event in events(directory)
        for value in event.summary.value
        if value.tag == name
    }


def test_tensorboard_reads_each_step(llama, text, tmp_path, fake_step):
    fake_step(5, 4)
    argv = ["train", "--hf", str(llama), "--data", str(text), "--seq", "16"]
    argv += ["--steps", "2", "--save", str(tmp_path / "run"), "--lr", "2e-3"]
    assert main([*argv, "--log-to", f"tensorboard:{tmp_path / 'board'}"]) == 0
    assert scalars(tmp_path / "board", "loss") == {1: 5, 2: 4}
    assert scalars(tmp_path / "board", "tokens_per_sec").keys() == {1, 2}
    (options,) = [
        value.tensor.string_val[0].decode()
        for event in events(tmp_path / "board")
        for value in event.summary.value
        if "options" in value.tag
    ]
    assert "'lr': 0.002" in options


def test_a_later_start_tells_tensorboard_to_drop_what_is_made_again(tmp_path):
    run = logged_run(tmp_path / "run", 3, {})
    with open_writers([f"tensorboard:{tmp_path}"], run) as write:
        write(StepMetrics(4, 1.0, float("nan"), 1.0, 1.0, 1))
    starts = [e.step for e in events(tmp_path) if e.session_log.status == 1]
    assert starts == [4]
    assert scalars(tmp_path, "loss") == {4: 1}
    assert scalars(tmp_path, "grad_norm") == {}  # It was not finite.


def test_a_run_has_the_same_identifier_at_each_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, later = logged_run(Path("run"), 0, {}), logged_run(tmp_path / "run", 5, {})
    assert (one.id, one.name) == (later.id, later.name)
    assert logged_run(tmp_path / "other", 0, {}).id != one.id


@pytest.mark.parametrize("name", ["tensorboard", "tensorboard:", "clearml:x", ":x"])
def test_a_log_that_there_is_not_is_refused(name, llama, text, tmp_path, capsys):
    argv = ["train", "--hf", str(llama), "--data", str(text), "--steps", "1"]
    save = tmp_path / "run"
    assert main([*argv, "--save", str(save), "--log-to", name]) == 2
    told = capsys.readouterr().err
    assert f"--log-to {name}" in told and "tensorboard:DIR" in told
    assert not save.exists()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    named = ("wandb:p", "wandb", "tensorboard:d", "tensorboardX")
    with pytest.raises(ValueError, match=facts(*named)):
        check_writers(["wandb:p", "tensorboard:d"])


def test_a_log_that_cannot_be_written_is_refused_before_the_run(
    llama, text, tmp_path, capsys
):
    argv = ["train", "--hf", str(llama), "--data", str(text), "--steps", "1"]
    save = tmp_path / "run"
    assert main([*argv, "--save", str(save), "--log-to", "tensorboard:/proc/x"]) == 2
    assert "'/proc/x'" in capsys.readouterr().err
    assert not save.exists()
