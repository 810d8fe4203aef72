"""The whole story as a reader types it, and the comparison that ends it."""

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_jax.cli import main

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(folder) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "fsdp_jax.cli", "demo", "--small", "--dir", folder]
    return subprocess.run(argv, capture_output=True, text=True)


def test_the_demo_runs_every_command_and_shows_it(demo):
    assert demo.returncode == 0, demo.stderr
    shown = [line.split()[2] for line in demo.stdout.splitlines() if line[:1] == "$"]
    assert shown == [
        "make-tiny-llama",
        "train",
        "train",
        "diff-metrics",
        "export",
        "compare",
    ]
    assert "largest relative difference" in demo.stdout
    assert "largest difference of logits" in demo.stdout


def test_an_untrained_model_fails_the_comparison(demo, folder, capsys):
    assert demo.returncode == 0, demo.stderr
    untrained, out = str(folder / "tiny-llama"), str(folder / "exported")
    assert main(["compare", untrained, out]) == 1
    assert "differ by more than --tolerance 0.0001" in capsys.readouterr().err
