"""What a run tells while it trains: figures, a curve, and the data of a bad step."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import struct
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

import bridge
import fsdp_jax as fsdp
from fsdp_jax.cli import main
from fsdp_jax.cli._data import make_batches, next_row
from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import next_token_loss
from fsdp_jax.cli._loss_curve import LossHistory, draw_curve
from fsdp_jax.cli._metrics import StepMetrics
from fsdp_jax.cli._screen import LiveScreen
from fsdp_jax.cli._tokens import Tokens
from fsdp_jax.cli._utilization import peak_flops
from fsdp_jax.data import HostShard
from fsdp_jax.planner import GPUS, model_flops

FIRST = StepMetrics(1, 3.0, 1.0, 1000.0, 0.5, 2**20)


def train(llama: Path, data: Path, folder: Path, steps: int, *options: str) -> int:
    argv = ["train", "--hf", str(llama), "--data", str(data), "--seq", "16"]
    argv += ["--steps", str(steps), "--save", str(folder / "run"), "--batch", "8"]
    return main([*argv, *options])


def test_a_bad_step_names_the_lines_of_its_batch(
    llama, tmp_path, fake_step, capsys, monkeypatch
):
    texts = [f"number {n}" for n in range(20)]
    lines = [json.dumps({"text": text}) for text in texts]
    lines.insert(3, "")  # So that lines and documents are not counted alike.
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(lines))
    seen = []
    put = fsdp.global_batch
    monkeypatch.setattr(
        fsdp, "global_batch", lambda *given: seen.append(given[1]) or put(*given)
    )
    fake_step(2.0, float("nan"))
    assert train(llama, file, tmp_path, 5, "--rows", "pad") == 1
    told = capsys.readouterr().err
    named = re.search(r"lines ([\d, ]+) of '([^']+)'", told)
    assert named and named[2] == str(file) and "step 2" in told
    wanted = {json.loads(lines[int(n) - 1])["text"] for n in named[1].split(",")}
    rows = seen[1]["tokens"]
    found = {bytes(row[row > 0].tolist()).decode() for row in rows}
    # The last byte of a document is a target alone.
    assert found == {text[:-1] for text in wanted} and len(wanted) > 1


def test_a_bad_step_names_the_tokens_of_its_text(
    llama, text, tmp_path, fake_step, capsys
):
    fake_step(2.0, float("inf"))
    assert train(llama, text, tmp_path, 5) == 1
    spans = re.findall(r"(\d+)-(\d+)", capsys.readouterr().err)
    content = np.frombuffer(text.read_bytes(), np.uint8)
    config = DataConfig("bytes", batch=8, seq=16)
    batches = make_batches(Tokens((content,)), config, HostShard(0, 1))
    _, second = next(batches), next(batches)
    rows = sorted(content[int(a) : int(b) + 1].tolist() for a, b in spans)
    assert rows == sorted(second.tolist())


def test_the_rows_of_a_batch_follow_from_the_position():
    content = np.arange(200, dtype=np.uint8)
    config = DataConfig("bytes", batch=4, seq=8)
    batches = make_batches(Tokens((content,)), config, HostShard(0, 1))
    batches.set_state({"first_row": 5, "next_index": 2})
    next(batches)
    assert batches.last_rows() == range(13, 17)
    assert next_row(batches.get_state(), 4) == 17


def test_mfu_is_the_models_flops_over_the_peak(llama, text, tmp_path, fake_step):
    fake_step(2.0, 1.0)
    metrics = tmp_path / "run.jsonl"
    options = ["--peak-tflops", "0.5", "--metrics", str(metrics)]
    assert train(llama, text, tmp_path, 2, *options) == 0
    plan = plan_decoder(bridge.from_hf_config(llama), fsdp.make_mesh())
    batch = jax.ShapeDtypeStruct((8, 17), np.int32)
    flops = model_flops(plan, next_token_loss, batch)
    for line in map(json.loads, metrics.read_text().splitlines()):
        peak = 0.5e12 * jax.device_count()
        assert line["mfu"] == pytest.approx(flops / line["step_secs"] / peak)


def test_the_peak_is_that_of_the_data_sheet_or_unknown():
    device = type("Device", (), {"device_kind": "NVIDIA H200"})()
    assert peak_flops([device], None) == GPUS["h200"].cost.peak_flops == 989e12
    assert peak_flops([device], 2.0) == 2e12
    assert peak_flops(jax.devices(), None) is None


def test_metrics_are_written_at_an_interval_and_after_the_last_step(
    llama, text, tmp_path, fake_step, capsys
):
    fake_step(5, 4, 3, 2, 1)
    assert train(llama, text, tmp_path, 5, "--log-every", "2") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(2, 4), (4, 2), (5, 1)]


@pytest.mark.parametrize(
    "option, value", [("--log-every", "0"), ("--peak-tflops", "-1")]
)
def test_figures_out_of_range_are_refused(option, value, llama, text, tmp_path, capsys):
    assert train(llama, text, tmp_path, 1, option, value) == 2
    assert f"{option} {value}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_curve_falls_as_the_loss_does():
    lines = draw_curve([4.0, 3.0, 2.0, 1.0], 20, 4, braille=False)
    # Each column reaches from its neighbour's height to its own.
    wanted = ["**", " **", "  **", "   *"]
    assert [line[9:].rstrip() for line in lines] == wanted
    assert lines[0].startswith("       4 ") and lines[-1].startswith("       1 ")
    assert draw_curve([], 20, 4) == []
    (first, *_, last) = draw_curve([2.0] * 500, 40, 4)
    assert len(first) == 40 and not last[9:].strip()


def test_a_history_keeps_the_mean_in_bounded_memory():
    history = LossHistory(limit=8)
    for loss in range(64):
        history.add(float(loss))
    assert len(history.means) < 8 and history.interval == 16
    assert np.mean(history.means) == np.mean(range(64))


@pytest.mark.parametrize("width", [40, 200])
def test_a_screen_fits_its_terminal_and_shows_every_figure(width):
    out = io.StringIO()
    console = Console(file=out, width=width, height=30, force_terminal=True)
    bar = Progress(console=console)
    screen = LiveScreen(console, bar, 0, 3)
    console.print(screen.render())  # Before the first step there is the bar alone.
    screen.show(FIRST)
    screen.show(StepMetrics(2, 2.0, 1.0, 1000.0, 0.5, 2**20, mfu=0.31, eval_loss=2.5))
    screen.show(StepMetrics(3, 2.1, 1.0, 1000.0, 0.5, 2**20, mfu=0.31, eval_loss=2.7))
    console.print(screen.render())
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out.getvalue())
    assert all(len(line) <= width for line in shown.splitlines())
    words = " ".join(shown.split())
    for figure in ("loss 2.1000", "MFU 31.0%", "1,000 tokens/s", "1.00 MiB"):
        assert figure in words
    assert "2.7000 (step 3), best 2.5000 (step 2)" in words


@contextlib.contextmanager
def terminal(monkeypatch) -> Iterator[list[bytes]]:
    """stdout and stderr on a terminal of 80 x 24; what it gets, when it is closed."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    found: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(master, 4096):
                found.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as file, monkeypatch.context() as each:
        each.setenv("TERM", "xterm")
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            each.delenv(name, raising=False)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            yield found
    reader.join(10)
    os.close(master)


def test_a_terminal_has_a_curve_and_a_pipe_a_line_a_step(
    llama, text, tmp_path, fake_step, capsys, monkeypatch
):
    fake_step(5, 4, 3)
    with terminal(monkeypatch) as found:
        assert train(llama, text, tmp_path / "seen", 3) == 0
    seen = b"".join(found).decode()
    assert "step 3/3" in seen and re.search("[\u2801-\u28ff]", seen)
    assert "\nstep 3  loss" not in seen  # The screen is in the place of the lines.
    fake_step(5, 4, 3)
    assert train(llama, text, tmp_path / "piped", 3) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
