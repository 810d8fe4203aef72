"""The examples run, at a size that a test can afford, and do what they are for."""

import dataclasses
import json
import re
from pathlib import Path

import dpo
import jax
import numpy as np
import own_equinox_model
import pretrain
import pytest
from flax import nnx
from helpers.tiny_tokenizer import write_tokenizer

import bridge
from bridge.models import Decoder, DecoderConfig

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = DecoderConfig(
    vocab_size=264,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "model"
    state = nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(jax.random.key(0))))
    bridge.save_hf(folder, state, CONFIG)
    write_tokenizer(folder, ["</s>"])
    return folder


def test_every_example_is_short_and_is_run_here():
    source = Path(__file__).read_text()
    run = set(re.findall(r"^import (\w+)$", source, flags=re.MULTILINE))
    files = sorted(EXAMPLES.glob("*.py"))
    assert {file.stem for file in files} <= run
    for file in files:
        assert 60 <= len(file.read_text().splitlines()) <= 175, file.name


def test_pretraining_goes_on_on_another_mesh_with_the_batches_that_come(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(2000) * 7 % 50)
    sizes = {"batch": 8, "seq": 8, "width": 16, "layers": 2, "vocab": 64}
    options = pretrain.Options(
        tmp_path / "tokens.npy", tmp_path / "run", steps=2, save_every=1, **sizes
    )
    pretrain.train(options)
    rest = dataclasses.replace(options, steps=4, replicas=2)
    later = pretrain.train(rest)
    assert later.keys() == {3, 4}
    whole = pretrain.train(dataclasses.replace(rest, save=tmp_path / "whole"))
    for number, loss in later.items():
        # bfloat16 products, summed on other devices.
        assert loss == pytest.approx(whole[number], rel=2e-2)


def test_an_equinox_model_learns(tmp_path, capsys):
    sizes = {"batch": 64, "width": 32, "layers": 1}
    options = own_equinox_model.Options(tmp_path / "run", steps=30, **sizes)
    accuracy = own_equinox_model.train(options)
    assert np.mean(accuracy[-5:]) > np.mean(accuracy[:5]) + 0.25
    assert "blocks" in capsys.readouterr().out  # The plan was printed.


def test_dpo_prefers_what_was_chosen(model, tmp_path, capsys):
    pairs = [
        {"prompt": f"{n}? ", "chosen": f"{n}!", "rejected": "no no"} for n in range(9)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs)))
    options = dpo.Options(
        model, file, tmp_path / "tuned", steps=4, batch=8, seq=12, lr=1e-3
    )
    metrics = dpo.train(options)
    # Before the first update policy and reference are the same.
    np.testing.assert_allclose(metrics[0]["loss"], np.log(2), rtol=1e-6)
    losses = [each["loss"] for each in metrics]
    assert losses == sorted(losses, reverse=True)
    assert metrics[-1]["margin"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert bridge.from_hf_config(tmp_path / "tuned") == CONFIG
