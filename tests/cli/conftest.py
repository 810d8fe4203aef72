"""A tiny Llama and a text, made without torch, and one run of the trainer."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import bridge
import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig
from fsdp_jax.cli import main

CONFIG = DecoderConfig(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished run: its checkpoints and its metrics."""

    save: Path
    metrics: Path


@pytest.fixture(scope="session")
def write_llama() -> Callable[..., Path]:
    """Writes a model; keywords replace fields of its config."""

    def write(path: Path, **fields) -> Path:
        config = dataclasses.replace(CONFIG, **fields)
        model = Decoder(config, rngs=nnx.Rngs(jax.random.key(0)))
        bridge.save_hf(path, nnx.state(model), config)
        return path

    return write


@pytest.fixture(scope="session")
def llama(tmp_path_factory, write_llama) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(100)))
    return file


@pytest.fixture(scope="session")
def trained(tmp_path_factory, llama, text) -> Trained:
    """Four steps on 8 devices, saved at 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    run = Trained(folder / "save", folder / "run.jsonl")
    options = ["--batch", "8", "--seq", "16", "--lr", "1e-2", "--save-every", "2"]
    status = main(
        ["train", "--hf", str(llama), "--data", str(text), "--steps", "4"]
        + ["--save", str(run.save), "--metrics", str(run.metrics), *options]
    )
    assert status == 0
    return run


@pytest.fixture
def fake_step(monkeypatch):
    """Steps that compute nothing; the loss of each is given, or its error raised."""

    def replace(*losses):
        remaining = iter(losses)

        def step(state, batch):
            loss = next(remaining)
            if isinstance(loss, BaseException):
                raise loss
            state = dataclasses.replace(state, step=state.step + 1)
            numbers = {"loss": np.float32(loss), "grad_norm": np.float32(1)}
            return state, {**numbers, "aux": {}}

        monkeypatch.setattr(fsdp, "make_train_step", lambda *_, **__: step)

    return replace
