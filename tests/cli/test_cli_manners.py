"""The command line is quiet, survives closed pipes, and explains its own options."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import bridge
import fsdp_jax as fsdp
from fsdp_jax import _quiet_import
from fsdp_jax.cli import _commands, main
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._metrics import StepMetrics, write_metrics
from fsdp_jax.cli._option_names import _OTHER_NAMES, option_names

ROOT = Path(__file__).parents[2]
STUB = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to "
    b"STDERR\nI0000 00:00:1.0 1 cudart_stub.cc:31] Could not find cuda drivers on your "
    b"machine, GPU will not be used.\n"
)


def test_a_command_says_nothing_of_cuda_that_is_not_there():
    # In a process of its own: in this one jax is imported long since.
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_jax", "--version"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == (f"fsdp-jax {fsdp.__version__}\n", "")


@pytest.mark.torch  # make-tiny-llama writes with it.
def test_nor_does_one_that_starts_the_backend_of_cpus(tmp_path):
    # jax loads its plugin then, and the plugin says it again.
    main(["make-tiny-llama", str(tmp_path / "tiny")])
    (tmp_path / "text").write_text("any text " * 20)
    options = ["--data", str(tmp_path / "text"), "--seq", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_jax", "eval", str(tmp_path / "tiny"), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cuda" not in done.stderr


def test_without_a_plugin_there_is_nothing_to_load(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fsdp-jax"])
    monkeypatch.setattr(_quiet_import, "has_driver", lambda: False)

    def found(name: str) -> None:  # As where jax for CPUs alone is installed.
        if "." in name:
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    _quiet_import.load_plugin()


def test_only_the_known_lines_are_dropped(capfd):
    other = b"E0000 another library complains\n"
    with _quiet_import.without_driver_lines():
        os.write(2, STUB + other + STUB)
    assert capfd.readouterr().err.encode() == other


def test_what_was_said_before_an_error_is_not_lost(capfd):
    with pytest.raises(ImportError), _quiet_import.without_driver_lines():
        os.write(2, b"the reason\n")
        raise ImportError
    assert capfd.readouterr().err == "the reason\n"


@pytest.mark.parametrize(
    "argv, orig_argv, expected",
    [
        (["/usr/bin/fsdp-jax", "plan"], ["python", "/usr/bin/fsdp-jax", "plan"], True),
        (["-m", "plan"], ["python", "-P", "-m", "fsdp_jax", "plan"], True),
        (["-m", "plan"], ["python", "-m", "fsdp_jax.cli", "plan"], True),
        (["x/__main__.py", "plan"], ["python", "-m", "fsdp_jax", "plan"], True),
        (["x/__main__.py"], ["python", "-m", "train_mine"], False),
        (["-m"], ["python", "-m", "train_mine"], False),
        (["train.py"], ["python", "train.py"], False),
    ],
)
def test_the_descriptors_of_other_programs_are_left_alone(
    argv, orig_argv, expected, monkeypatch
):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert _quiet_import.is_command_line() == expected


@contextlib.contextmanager
def closed_stdout() -> Iterator[None]:
    """stdout whose reader has gone, as behind `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file, contextlib.redirect_stdout(file):
        yield


def test_a_command_whose_reader_has_gone_ends_quietly(llama, capfd):
    with closed_stdout():
        assert main(["inspect", str(llama)]) == 141
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("argv", [["train", "--help"], ["--version"]])
def test_help_and_version_whose_reader_has_gone_end_quietly(argv, capfd):
    with closed_stdout():
        assert main(argv) == 141
    assert capfd.readouterr().err == ""


def test_an_output_on_a_full_disk_is_an_error_of_one_line(capfd):
    with open("/dev/full", "w") as file, contextlib.redirect_stdout(file):
        assert main(["--version"]) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("fsdp-jax: error: ") and "No space left" in said


def test_closed_streams_are_opened_to_nowhere(llama, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["inspect", str(llama)]) == 0
    for stream in (sys.stdout, sys.stderr):
        assert stream is not None and stream.name == os.devnull
        stream.close()
    assert capfd.readouterr() == ("", "")


def test_a_run_whose_reader_has_gone_goes_on(llama, text, tmp_path, fake_step, capfd):
    fake_step(3, 2)
    argv = ["train", "--hf", str(llama), "--data", str(text), "--steps", "2"]
    with closed_stdout():
        assert main([*argv, "--seq", "16", "--save", str(tmp_path / "save")]) == 0
    assert fsdp.latest_step(tmp_path / "save") == 2
    said = capfd.readouterr().err
    assert said.count("stdout was closed") == 1 and "step 1 on" in said


def test_people_and_programs_each_get_their_metrics(capsys, monkeypatch):
    metrics = StepMetrics(7, 2.5, 1.25, 1234.0, 0.1, 2**20)
    write_metrics(sys.stdout, metrics)
    assert capsys.readouterr().out.startswith('{"step": 7, "loss": 2.5')
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_metrics(sys.stdout, metrics)
    wanted = "step 7  loss 2.5000  grad norm 1.25  1,234 tokens/s  1.00 MiB\n"
    assert capsys.readouterr().out == wanted


def test_every_name_of_others_is_for_an_option_of_ours():
    known = set(option_names(_commands()["train"]))
    assert {name.partition(" ")[0] for name in _OTHER_NAMES.values()} <= known
    assert not known & _OTHER_NAMES.keys()


def help_of(argv: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*argv, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_an_option_of_another_trainer_is_translated(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--learning_rate", "1e-3", "--model=x", "--nonsense"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "--learning-rate is --lr here (see fsdp-jax train --help)" in said
    assert "--model is --hf here" in said
    assert said.count(" here (see") == 2
    assert "fsdp-jax train --help" in said.partition("here (see")[0]


@pytest.mark.parametrize(
    "words, says",
    [
        ("plan --dp-shard 4", "--dp-shard is --mesh dp_shard=N here"),
        ("train --mesh tp=2", "--dp-shard N, --ep N, --cp N, --tp N here"),
    ],
)
def test_an_axis_is_named_as_the_command_names_it(words, says, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "word, near", [("trian", "train"), ("imports", "import"), ("--verison", None)]
)
def test_a_mistyped_command_is_told_the_nearest_one(word, near, capsys):
    with pytest.raises(SystemExit):
        main([word])
    said = capsys.readouterr().err
    hint = f"there is no command {word!r}: did you mean fsdp-jax {near}?"
    assert (hint in said) == (near is not None)
    assert ("did you mean" in said) == (near is not None)


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_options_of_a_launched_program_need_two_dashes_before_it(dashes, capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--processs", "2", *dashes, "python", "train.py", "--lr", "1"])
    assert ("follows a --" in capsys.readouterr().err) == (not dashes)


@pytest.mark.parametrize("columns", ["80", "40"])
def test_the_help_has_groups_and_fits_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    said = help_of(["train"], capsys)
    assert max(map(len, said.splitlines())) <= int(columns)
    for group in ("start", "optimizer", "mesh", "checkpoints"):
        assert f" {group} options " in said


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_is_heeded(no_color, monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert ("\x1b[" in help_of(["doctor"], capsys)) == (not no_color)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_every_command_and_its_options(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in (*_commands(), "param-dtype"))


START = "train --data {text} --save {save} --seq 16 --steps 2"


def run(argv: str, *more: str, **paths: Path) -> int:
    return main([*(word.format_map(paths) for word in argv.split()), *more])


def test_a_config_starts_from_random_weights_of_the_seed(
    llama, text, tmp_path, fake_step
):
    fake_step(3, 2)
    argv = START + " --config {llama}/config.json --seed 7"
    assert run(argv, text=text, save=tmp_path / "run", llama=llama) == 0
    config = fsdp.checkpoint.load_metadata(tmp_path / "run")["config"]
    assert config["model_type"] == "llama"
    plan = plan_decoder(bridge.from_hf_config(llama), fsdp.make_mesh())
    found = fsdp.checkpoint.load_params(tmp_path / "run", plan.params)
    equal = [
        jax.tree.all(jax.tree.map(np.array_equal, found, wanted))
        for wanted in (fsdp.init_params(plan, jax.random.key(seed)) for seed in (7, 8))
    ]
    assert equal == [True, False]


def test_a_run_goes_on_from_the_disk_of_the_host(
    llama, text, tmp_path, fake_step, capsys
):
    argv = START + " --hf {llama} --local-checkpoints {disk} --local-keep 1"
    argv = argv.replace("--steps 2", "--steps 4")
    paths = {"text": text, "save": tmp_path / "run", "llama": llama}
    metrics = ("--metrics", str(tmp_path / "run.jsonl"))
    fake_step(5, 4, ValueError("the host is lost"))
    assert run(argv, *metrics, **paths, disk=tmp_path / "disk") == 2
    assert fsdp.latest_step(tmp_path / "run") is None
    fake_step(2)
    other = argv + " --seed 3"
    assert run(other, **paths, disk=tmp_path / "disk") == 2
    said = capsys.readouterr().err
    assert "step 2 of a run that another command began" in said
    assert f"'{tmp_path / 'disk'}'" in said
    fake_step(3, 2)  # and no more
    assert run(argv, *metrics, **paths, disk=tmp_path / "disk") == 0
    assert "step 2 on the local disks" in capsys.readouterr().err
    assert fsdp.latest_step(tmp_path / "run") == 4
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        f'{{"step": {step}' for step in (1, 2, 3, 4)
    ]


_INTERRUPTED_COMPILER = """
import os, signal, threading
import jax, jax.numpy as jnp
import jax._src.api
import fsdp_jax.cli

# What jax does as the process ends: not while a thread may still compile.
jax._src.api.clear_backends = lambda **_: print("cleared")

def many(x):
    for i in range(500):
        x = jnp.sin(x @ x) + i
    return x

def compiles():
    lowered = jax.jit(many).lower(jax.ShapeDtypeStruct((64, 64), "float32"))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        lowered.compile()
    except KeyboardInterrupt:
        return 130
    return 0

fsdp_jax.cli.main = compiles
fsdp_jax.cli.run()
"""


def test_an_interrupt_of_xlas_compiler_is_the_status_of_an_interrupt():
    """Python's own end would be a segmentation fault of XLA's threads."""
    command = [sys.executable, "-c", _INTERRUPTED_COMPILER]
    ended = subprocess.run(command, check=False, capture_output=True)
    assert ended.returncode == 128 + signal.SIGINT, ended.stderr
    assert b"cleared" not in ended.stdout
