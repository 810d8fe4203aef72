"""A function of the user's sees the numbers of each step, and cannot break them."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.cli import main
from fsdp_jax.cli._callback import call, load_callback
from fsdp_jax.cli._metrics import StepMetrics

METRICS = StepMetrics(3, 2.5, 1.0, 1e4, 0.5, 10**9)

MODULE = """
import json, pathlib

NUMBER = 3
seen = []

def send(metrics):
    seen.append(metrics)
    line_is_written = pathlib.Path("run.jsonl").read_text().splitlines()[-1]
    assert json.loads(line_is_written) == metrics
    metrics.clear()  # its own dict, to do with as it likes

def keep(metrics):
    seen.append(metrics)

def fail(metrics):
    if metrics["step"] == 2:
        raise ValueError("no such server")
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Iterator[Path]:
    """The current directory, with a module that no path leads to."""
    (tmp_path / "my_logs.py").write_text(MODULE)
    (tmp_path / "my_broken.py").write_text("raise RuntimeError('two\\nlines')")
    (tmp_path / "my_typo.py").write_text("def send(metrics:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    for name in ("my_logs", "my_broken", "my_typo"):
        sys.modules.pop(name, None)


def train(llama, text, *options: str) -> int:
    return main(
        ["train", "--hf", str(llama), "--data", str(text), "--steps", "3"]
        + ["--seq", "16", "--save", "save", "--metrics", "run.jsonl", *options]
    )


def lines() -> list[dict]:
    return [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]


def test_the_callback_sees_the_numbers_of_the_json_lines(here, llama, text):
    assert train(llama, text, "--callback", "my_logs:keep") == 0
    seen = sys.modules["my_logs"].seen
    assert seen == lines()
    assert [metrics["step"] for metrics in seen] == [1, 2, 3]
    for metrics in seen:
        assert type(metrics) is dict
        assert {type(value) for value in metrics.values()} <= {int, float}


def test_the_callback_comes_after_its_line_and_owns_its_dict(
    here, llama, text, fake_step
):
    fake_step(3, 2, 1)
    assert train(llama, text, "--callback", "my_logs:send") == 0
    assert sys.modules["my_logs"].seen == [{}, {}, {}]
    assert [line["step"] for line in lines()] == [1, 2, 3]


def test_a_callback_that_raises_ends_the_run_with_its_own_traceback(
    here, llama, text, fake_step
):
    fake_step(3, 2)
    with pytest.raises(RuntimeError, match=facts("--callback", "2")) as error:
        train(llama, text, "--callback", "my_logs:fail")
    assert str(error.value.__cause__) == "no such server"
    assert [line["step"] for line in lines()] == [1, 2]
    assert fsdp.latest_step("save") is None


@pytest.mark.parametrize("rank, times", [(0, 1), (1, 0)])
def test_only_the_first_process_calls(rank, times, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: rank)
    seen = []
    call(seen.append, METRICS)
    assert len(seen) == times


def test_a_callback_of_an_installed_module_needs_no_current_directory():
    assert load_callback("json:dumps") is json.dumps


@pytest.mark.parametrize(
    "name, message",
    [
        ("my_logs", "not of the form module:function"),
        (":send", "not of the form module:function"),
        ("my_logs:", "not of the form module:function"),
        ("my_lost:send", "'my_lost' cannot be imported (ModuleNotFoundError"),
        ("my_broken:send", r"cannot be imported (RuntimeError('two\nlines'))"),
        ("my_typo:send", "cannot be imported (SyntaxError"),
        (".my_logs:send", "cannot be imported (TypeError"),
        ("my_logs:sent", "my_logs.py' has no 'sent' that can be called"),
        ("my_logs:NUMBER", "my_logs.py' has no 'NUMBER' that can be called"),
    ],
)
def test_a_bad_callback_is_one_line_before_any_device_is_touched(
    name, message, here, llama, text, capsys, monkeypatch
):
    monkeypatch.setattr(jax, "devices", None)
    before = set(here.iterdir())
    assert train(llama, text, "--callback", name) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fsdp-jax: error: --callback {name}: ")
    assert message in err
    assert err.count("\n") == 1
    assert {path for path in here.iterdir() if path.name != "__pycache__"} == before
