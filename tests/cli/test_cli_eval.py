"""Perplexity from the command line: every token counts once."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge
from bridge.models import Decoder
from fsdp_jax.cli import main

SEQ = 24


def evaluated(capsys, model, text, *options) -> dict[str, float]:
    argv = ["eval", str(model), "--data", str(text), "--seq", str(SEQ), *options]
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out)


def rows_of(text) -> list[np.ndarray]:
    tokens = np.frombuffer(text.read_bytes(), np.uint8).astype(np.int32)
    starts = range(0, len(tokens) - 1, SEQ)
    return [tokens[start : start + SEQ + 1] for start in starts]


def losses_of_one_device(path, rows) -> np.ndarray:
    """Row by row, the last one as short as it is."""
    config = bridge.from_hf_config(path)
    model = Decoder(config, rngs=nnx.Rngs(jax.random.key(0)))
    nnx.update(model, bridge.load_hf(path, nnx.state(model)))

    @jax.jit
    def losses(row):
        log_probs = jax.nn.log_softmax(model(row[None, :-1]).astype(jnp.float32))
        return -jnp.take_along_axis(log_probs, row[None, 1:, None], -1).ravel()

    return np.concatenate([losses(row) for row in rows])


def test_perplexity_is_that_of_one_device_over_every_token(llama, text, capsys):
    rows = rows_of(text)
    assert len(rows[-1]) < SEQ + 1 and len(rows) % 8  # a short row, a short batch
    want = losses_of_one_device(llama, rows)
    found = evaluated(capsys, llama, text)
    assert found["tokens"] == len(want) == text.stat().st_size - 1
    assert found["loss"] == pytest.approx(want.mean(), rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(want.mean()), rel=1e-5)
    # That the padding counts for nothing: with it, the mean would be another.
    assert abs(want.sum() / (len(rows) * SEQ) / want.mean() - 1) > 1e-4


def test_batches_and_devices_change_nothing(llama, text, capsys):
    one = evaluated(capsys, llama, text)
    other = evaluated(capsys, llama, text, "--devices", "2", "--batch", "6")
    assert other["tokens"] == one["tokens"]
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_training_lowers_it(trained, llama, text, capsys):
    before = evaluated(capsys, llama, text)
    after = evaluated(capsys, trained.save, text)
    earlier = evaluated(capsys, trained.save, text, "--step", "2")
    assert after["loss"] < earlier["loss"] < before["loss"]


@pytest.mark.parametrize(
    "options, says",
    [
        (["--batch", "3"], "--batch 3: 8 devices share the rows evenly"),
        (["--seq", "0"], "--seq 0 must be at least 1"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(llama, text, capsys, options, says):
    assert main(["eval", str(llama), "--data", str(text), *options]) == 2
    assert says in capsys.readouterr().err


def test_a_single_token_predicts_nothing(llama, tmp_path, capsys):
    (tmp_path / "a").write_text("a")
    assert main(["eval", str(llama), "--data", str(tmp_path / "a")]) == 2
    assert "nothing to predict" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "train", "compare"])
def test_rows_longer_than_learned_positions_are_refused(
    command, text, tmp_path, capsys
):
    fields = hf_fields("gpt2", max_position_embeddings=32, vocab_size=256)
    config = bridge.from_hf_config(fields)
    model = str(tmp_path / "model")
    bridge.save_hf(model, nnx.state(Decoder(config, rngs=nnx.Rngs(0))), config)
    data = ["--data", str(text)]
    argv = {
        "eval": [model, *data],
        "train": ["--hf", model, *data, "--steps", "1", "--save", str(tmp_path / "x")],
        "compare": [model, model, "--against", "bridge"],
    }[command]
    assert main([command, *argv, "--seq", "33"]) == 2
    said = capsys.readouterr().err
    assert re.search(facts("--seq 33", "max_position_embeddings = 32", "gpt2"), said)
    assert not (tmp_path / "x").exists()
