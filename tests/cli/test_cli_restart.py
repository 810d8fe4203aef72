"""The same command again goes on with what it began, to the bit, however it ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.damage import (
    ORBAX_FAILS_NOISILY,
    file_size_limited,
    files_of,
    first_value,
)
from helpers.errors import facts
from helpers.saving_worker import state_at
from safetensors.numpy import load_file

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves
from fsdp_jax.checkpoint._steps import newest_good
from fsdp_jax.cli import _run_marker, main
from fsdp_jax.cli._metrics import metrics_lines
from fsdp_jax.cli._orbax_log import _OF_WRITES, _TRACEBACKS, _Unraisable

ROOT = Path(__file__).parents[2]
STEPS = 40
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "PYTHONPATH": str(ROOT),
}
MEASURED = ("tokens_per_sec", "step_secs", "peak_memory_bytes")


@pytest.fixture(scope="module")
def command(llama, text) -> Callable[[Path], list[str]]:
    """The command whose run is in a folder."""

    def make(folder: Path) -> list[str]:
        return (
            ["train", "--hf", str(llama), "--data", str(text), "--steps", str(STEPS)]
            + ["--save", str(folder / "run"), "--metrics", str(folder / "run.jsonl")]
            + ["--seq", "16", "--lr", "1e-2", "--save-every", "4", "--keep", "3"]
        )

    return make


def lines(folder: Path) -> list[dict]:
    """The metrics, without what is measured by a clock."""
    path = folder / "run.jsonl"
    found = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in found]


def bits(folder: Path) -> dict[str, bytes]:
    """Every leaf of the newest step."""
    shapes = fsdp.checkpoint.load_shapes(folder / "run")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for name, leaf in shapes.items()
    }
    loaded = named_leaves(fsdp.load(folder / "run", like))
    return {name: np.asarray(leaf).tobytes() for name, leaf in loaded}


# Steps of a tiny model are over before a signal arrives.
SLOWLY = "import time\ndef down(metrics): time.sleep(0.03)\n"


@contextlib.contextmanager
def started(argv: list[str], cwd: Path = ROOT) -> Iterator[subprocess.Popen]:
    """The command in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "fsdp_jax.cli", *argv, "--cpu-devices", "2"],
        cwd=cwd,
        env=os.environ | ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(argv: list[str]) -> None:
    with started(argv) as process:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said


def stop_at(step: int, number: signal.Signals, folder: Path, argv: list[str]):
    """Sends a signal once a step is done; the status, and what was said."""
    metrics, end = folder / "run.jsonl", time.monotonic() + 300
    (folder / "slowly.py").write_text(SLOWLY)
    with started([*argv, "--callback", "slowly:down"], folder) as process:
        while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.002)
        process.send_signal(number)
        _, said = process.communicate(timeout=300)
        return process.returncode, said


@pytest.fixture(scope="module")
def whole(tmp_path_factory, command) -> Path:
    """A run that nothing stopped; in such a process too, for the last bit."""
    folder = tmp_path_factory.mktemp("whole")
    finish(command(folder))
    return folder


def test_after_sigterm_and_after_kill_it_ends_as_if_nothing_had_happened(
    whole, command, tmp_path
):
    argv = command(tmp_path)
    status, said = stop_at(9, signal.SIGTERM, tmp_path, argv)
    assert status == 143 and "stopped: step" in said
    stopped = fsdp.latest_step(tmp_path / "run")
    assert stopped is not None and 9 <= stopped < STEPS
    assert [line["step"] for line in lines(tmp_path)] == [*range(1, stopped + 1)]

    status, _ = stop_at(stopped + 14, signal.SIGKILL, tmp_path, argv)
    assert status == -signal.SIGKILL
    killed = fsdp.latest_step(tmp_path / "run")
    assert killed is not None and stopped < killed < STEPS
    assert len(lines(tmp_path)) >= stopped + 14

    finish(argv)
    assert bits(tmp_path) == bits(whole)
    assert lines(tmp_path) == lines(whole)
    steps = sorted(p.name for p in (tmp_path / "run").iterdir() if p.is_dir())
    assert steps == ["32", "36", "40"]  # --keep 3


def test_a_run_that_is_done_is_left_as_it_is(whole, command, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert main([*command(whole), "--devices", "2"]) == 0
    assert f"step {STEPS} is in {whole / 'run'} already" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_a_damaged_newest_step_is_set_aside_and_made_again(
    llama, text, tmp_path, fake_step, capsys
):
    argv = ["train", "--hf", str(llama), "--data", str(text), "--save-every", "1"]
    argv += ["--seq", "16", "--save", str(tmp_path / "run"), "--steps"]
    fake_step(5, 4, 3)
    assert main([*argv, "3"]) == 0
    run = tmp_path / "run"
    weights = load_file(llama / "model.safetensors")  # which the fake step left alone
    path, bit = first_value(run / "3", weights["model.embed_tokens.weight"][0])
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1
    path.write_bytes(content)
    fake_step(3, 2)
    with pytest.warns(UserWarning, match=facts("Step 3", 1)):
        assert main([*argv, "4"]) == 0
    said = f"step 3 is damaged and now called {run / '3.damaged'}"
    assert said in capsys.readouterr().err
    steps = {path.name for path in run.iterdir() if path.is_dir()}
    assert steps == {"1", "2", "3", "3.damaged", "4"}
    assert fsdp.checkpoint.verify(run, step=3) and fsdp.checkpoint.verify(run, step=4)


@pytest.fixture
def run_of_two(tmp_path) -> Path:
    fsdp.save(tmp_path / "run", state_at(1))
    fsdp.save(tmp_path / "run", state_at(2))
    return tmp_path / "run"


def spoil(folder: Path) -> None:
    file = max(files_of(folder / "state"), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])


def test_a_step_that_is_committed_while_others_are_checked_stays(
    run_of_two, monkeypatch
):
    def meanwhile(path, available):
        found = newest_good(path, available)
        fsdp.save(path, state_at(3))
        return found

    monkeypatch.setattr(_run_marker, "newest_good", meanwhile)
    assert _run_marker.newest_good_step(run_of_two) == 2
    assert {"1", "2", "3"} <= {path.name for path in run_of_two.iterdir()}


def test_no_damaged_step_is_renamed_under_another_writer(run_of_two):
    spoil(run_of_two / "2")
    with fsdp.Checkpointer(run_of_two):
        with pytest.warns(UserWarning, match=facts("Step 2")):
            with pytest.raises(ValueError, match=facts(f"process {os.getpid()}")):
                _run_marker.newest_good_step(run_of_two)
    assert (run_of_two / "2").is_dir()
    with pytest.warns(UserWarning, match=facts("Step 2")):
        assert _run_marker.newest_good_step(run_of_two) == 1
    assert (run_of_two / "2.damaged").is_dir()


def test_an_interrupted_run_says_which_step_is_saved(
    llama, text, tmp_path, fake_step, capsys
):
    argv = ["train", "--hf", str(llama), "--data", str(text), "--save-every", "1"]
    argv += ["--seq", "16", "--save", str(tmp_path / "run"), "--steps", "9"]
    fake_step(KeyboardInterrupt())
    assert main(argv) == 130
    assert "interrupted: no step is saved" in capsys.readouterr().err
    fake_step(5, 4, KeyboardInterrupt())
    assert main(argv) == 130
    assert f"interrupted: step 2 is in {tmp_path / 'run'}:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, says",
    [
        (["--lr", "3e-2"], "lr 0.01 there, 0.03 here"),
        (["--batch", "16"], "batch not given there, 16 here"),
        (["--metrics", "other.jsonl"], "metrics "),
        (["--hf", "other"], "hf "),
    ],
)
def test_another_command_does_not_go_on_with_it(whole, command, change, says, capsys):
    assert main([*command(whole), *change]) == 2
    said = capsys.readouterr().err
    assert f"holds step {STEPS} of a run that this command did not begin" in said
    assert says in said and "--resume" in said


def test_a_run_that_saved_nothing_is_in_nobodys_way(llama, text, tmp_path, fake_step):
    argv = ["train", "--hf", str(llama), "--data", str(text), "--steps", "2"]
    argv += ["--seq", "16", "--save", str(tmp_path / "run"), "--lr"]
    fake_step(float("nan"))
    assert main([*argv, "1e-1"]) == 1
    fake_step(5, 4)
    assert main([*argv, "1e-2"]) == 0
    assert main([*argv, "1e-1"]) == 2  # but now it would be
    assert main([*argv, "1e-2"]) == 0
    assert fsdp.latest_step(tmp_path / "run") == 2


@ORBAX_FAILS_NOISILY
def test_a_full_disk_is_one_message_and_the_same_command_goes_on(
    llama, text, tmp_path, fake_step, capsys, caplog
):
    argv = ["train", "--hf", str(llama), "--data", str(text), "--seq", "16"]
    argv += ["--save", str(tmp_path / "run"), "--steps", "2"]
    fake_step(5, 4)
    with file_size_limited(20_000):
        assert main(argv) == 2
    assert "fsdp-jax: error: Step 2 is not saved: " in capsys.readouterr().err
    of_orbax = [record for record in caplog.records if record.name == "absl"]
    assert of_orbax and not any(record.exc_info for record in of_orbax)
    gc.collect()  # what of the failed write ends later ends here
    fake_step(5, 4)
    assert main(argv) == 0
    assert fsdp.checkpoint.verify(tmp_path / "run").step == 2


@pytest.mark.parametrize(
    "path, error, shown",
    [
        ("orbax/manager.py", KeyboardInterrupt(), None),
        ("orbax/manager.py", OSError("no space"), "not saved: no space"),
        ("mine.py", KeyboardInterrupt(), "not saved:"),
    ],
)
def test_what_orbax_logs_of_a_failure_is_a_line_and_of_an_interrupt_none(
    path, error, shown
):
    given = logging.LogRecord(
        "absl", logging.ERROR, path, 1, "not saved:", (), (type(error), error, None)
    )
    record = given if _TRACEBACKS.filter(given) else None
    assert (record and record.getMessage()) == shown
    assert record is None or path == "mine.py" or not record.exc_info


@pytest.mark.parametrize(
    "message, error, is_shown",
    [
        ("exception was never retrieved", ValueError("X: Error writing 'a'"), False),
        ("exception was never retrieved", ValueError("of mine"), True),
        ("Task failed", ValueError("X: Error writing 'a'"), True),
    ],
)
def test_writes_that_fail_beside_the_one_that_is_raised_are_not_shown(
    message, error, is_shown
):
    info = type(error), error, None
    record = logging.LogRecord("asyncio", logging.ERROR, "", 1, message, (), info)
    assert bool(_OF_WRITES.filter(record)) == is_shown


def mine():
    raise RuntimeError("Event loop is closed")


def test_a_closed_event_loop_is_not_shown_unless_it_is_anothers():
    shown = []
    hook, loop = _Unraisable(shown.append), asyncio.new_event_loop()
    loop.close()
    for call, count in ((lambda: loop.call_soon_threadsafe(print), 0), (mine, 1)):
        with pytest.raises(RuntimeError) as error:
            call()
        # TensorStore's threads have no frame of Python above asyncio's.
        trace = error.tb
        while trace.tb_next and "asyncio" not in trace.tb_frame.f_code.co_filename:
            trace = trace.tb_next
        hook(types.SimpleNamespace(exc_value=error.value, exc_traceback=trace))
        assert len(shown) == count


def test_metrics_of_steps_that_come_again_are_taken_out(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    with metrics_lines(path, start=2) as file:
        file.write('{"step": 3}\n')
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
