"""What is built is what is there, and works where the checkout is not."""

from __future__ import annotations

import email
import email.message
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import jax
import pytest
from flax import nnx

import bridge
import fsdp_jax
from bridge.models import Decoder, DecoderConfig

ROOT = Path(__file__).parents[1]
CONFIG = DecoderConfig(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def build(source: Path, target: str, out: Path) -> Path:
    """A wheel or an sdist, by the backend that pip would call."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out]
    subprocess.run(command, check=True, cwd=source, capture_output=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, sdist) -> Path:
    """Built from the sdist alone, as pip builds it where there is no wheel."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory, wheel) -> Path:
    """A fresh environment with the wheel, and what it depends on from this one.

    A plain path in a .pth file brings this environment's packages in, and not the
    checkout: .pth files in there, an editable install among them, are not followed.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    ours = Path(sysconfig.get_path("purelib", "venv", paths))
    (ours / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    options = ["--no-deps", "--no-index", "--force-reinstall", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", *options, wheel],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def run(environment, tmp_path_factory):
    """Runs a program of the environment, in a folder that has a model and a text."""
    folder = tmp_path_factory.mktemp("outside")
    model = Decoder(CONFIG, rngs=nnx.Rngs(jax.random.key(0)))
    bridge.save_hf(folder / "model", nnx.state(model), CONFIG)
    (folder / "text").write_text("All that a model needs is text. " * 20)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def run(program: str, *arguments: str) -> str:
        done = subprocess.run(
            [environment / "bin" / program, *arguments],
            cwd=folder,
            env=clean | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_both_packages_are_of_the_environment(run, environment):
    code = "import fsdp_jax, bridge; print(fsdp_jax.__file__, bridge.__file__)"
    assert all(
        path.startswith(str(environment)) for path in run("python", "-c", code).split()
    )


def test_it_trains_plans_and_converts(run):
    small = ["--batch", "2", "--seq", "8"]
    metrics = run(
        *("fsdp-jax", "train", "--hf", "model", "--data", "text", "--save", "run"),
        *("--steps", "1", "--cpu-devices", "2", *small),
    )
    assert '"loss"' in metrics
    simple = ["--prefetch", "0", "--unroll", "1"]
    planned = run(
        *("fsdp-jax", "plan", "--config", "model", "--gpus", "2", *simple, *small)
    )
    assert "all-gather" in planned
    run("fsdp-jax", "convert", "model", "megatron", "--to", "torch_dist")


def test_the_wheel_has_the_sources_and_what_lies_beside_them(wheel):
    there = {
        path.relative_to(ROOT).as_posix()
        for package in ("fsdp_jax", "bridge")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == there
    assert {"fsdp_jax/py.typed", "bridge/py.typed"} <= there
    assert any(name.startswith("fsdp_jax/launch/examples/") for name in there)


def test_the_metadata_is_that_of_the_project(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (about,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_string(archive.read(about).decode())
        license_file = about.replace("METADATA", "licenses/LICENSE")
        assert archive.read(license_file) == (ROOT / "LICENSE").read_bytes()
        entry = archive.read(about.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["Version"] == fsdp_jax.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"cuda12", "cuda13", "plan", "torch", "test", "docs"} <= extras
    assert "fsdp-jax = fsdp_jax.cli:run" in entry
    assert str(metadata.get_payload()) == (ROOT / "README.md").read_text()


def test_the_sdist_has_what_tests_and_documentation_need(sdist):
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    needed = {"tests/conftest.py", "docs/mkdocs.yml", "Makefile", "CHANGELOG.md"}
    needed |= {
        f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")
    }
    assert needed | {"LICENSE", "README.md", "pyproject.toml"} <= names
