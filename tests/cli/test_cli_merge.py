"""`fsdp-jax merge` and `convert --optimizer` on the command line."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from bridge_helpers import random_tensors, tensors_of, write_llama

from bridge.megatron import open_megatron
from fsdp_jax.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def models(tmp_path) -> list[str]:
    paths = [tmp_path / "a", tmp_path / "b"]
    tensors = random_tensors(np.float32)
    write_llama(paths[0], tensors=tensors)
    write_llama(paths[1], tensors={k: v + 2 for k, v in tensors.items()})
    return [str(path) for path in paths]


def test_the_mean_of_two_models_is_written(models, tmp_path):
    out = tmp_path / "out"
    assert main(["merge", *models, "--out", str(out)]) == 0
    expected = random_tensors(np.float32)
    for key, values in tensors_of(out).items():
        np.testing.assert_allclose(values, expected[key] + 1, rtol=1e-6, atol=1e-6)


def test_weights_and_formats_are_given(models, tmp_path):
    out = tmp_path / "out"
    argv = ["--out", str(out), "--weights", "1", "0", "--to", "torch_dist"]
    assert main(["merge", *models, *argv]) == 0
    found = open_megatron(out).source.read("decoder.final_layernorm.weight")
    assert found.tobytes() == random_tensors(np.float32)["model.norm.weight"].tobytes()


@pytest.mark.parametrize(
    "more, message",
    [
        ([], "two or more"),
        (["{b}", "--weights", "2", "1"], "add up to 3"),
        (["{b}", "--tensor-parallel", "2"], "none is written"),
        (["{other}"], "rope"),
    ],
)
def test_what_cannot_be_merged_is_one_message(models, tmp_path, more, message, capsys):
    write_llama(tmp_path / "other")
    config = tmp_path / "other/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5e5}))
    places = {"b": models[1], "other": str(tmp_path / "other")}
    words = [word.format(**places) for word in more]
    assert main(["merge", models[0], *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_of_megatrons_is_converted_with_its_optimizer(tmp_path, capsys):
    with tarfile.open(GOLDEN / "qwen3.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    run, there = tmp_path / "qwen3/torch_dist", tmp_path / "there"
    words = ["convert", str(run), str(there), "--to", "fsdp_dtensor", "--optimizer"]
    assert main(words) == 0
    assert "'rng_state" in capsys.readouterr().err
    optimizer, expected = open_megatron(there).optimizer, open_megatron(run).optimizer
    assert optimizer is not None and expected is not None
    key = "decoder.layers.3.mlp.linear_fc1.weight"
    assert optimizer.exp_avg.read(key).tobytes() == expected.exp_avg.read(key).tobytes()
    for words, message in (
        (["--to", "hf", "--optimizer"], "fsdp-jax import --optimizer"),
        (["--to", "legacy", "--optimizer-format", "plain"], "--optimizer too"),
    ):
        assert main(["convert", str(run), str(tmp_path / "out"), *words]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
