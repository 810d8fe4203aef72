"""Models with state-space, delta-net and convolution layers on the command line."""

import json
from pathlib import Path

import jax
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tiny_configs import hf_fields

import bridge
from bridge.models import Decoder
from fsdp_jax.cli import main

# Each with what eight tensor-parallel ranks cannot share.
HYBRIDS = {
    "qwen3_next": "delta_net.num_key_heads 2",
    "nemotron_h": "mamba.num_heads 4",
    "granitemoehybrid": "mamba.num_heads 4",
    "mamba2": "mamba.num_heads 4",
    "lfm2": "num_attention_heads 4",
    "falcon_h1": "mamba.num_heads 4",
    "jamba": "num_attention_heads 4",
    "zamba2": "num_attention_heads 4",
    "deepseek_v4": "compressed_attention.o_groups 2",
}
NAME = "model.safetensors"
KEPT = ("correction_bias", "indexer", "layer_scalar", "norm", "embed", "tid2eid")
WITHOUT_EXPERTS = ("mamba2", "lfm2", "falcon_h1", "zamba2")


@pytest.fixture
def directory(tmp_path):
    """Writes a family's tiny model as a user has it: config.json and weights."""

    def write(family: str, *, weights: bool = True) -> str:
        config = bridge.from_hf_config(hf_fields(family, vocab_size=256))
        path = tmp_path / "model"
        if weights:
            model = Decoder(config, rngs=nnx.Rngs(jax.random.key(0)))
            bridge.save_hf(path, nnx.state(model, nnx.Param), config)
        else:
            path.mkdir()
            fields = bridge.to_hf_config(config)
            (path / "config.json").write_text(json.dumps(fields))
        return str(path)

    return write


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_is_trained_and_exported(family, directory, text, tmp_path):
    save, metrics = str(tmp_path / "save"), tmp_path / "metrics.jsonl"
    options = ["--data", str(text), "--metrics", str(metrics), "--devices", "1"]
    first = ["train", "--hf", directory(family), "--batch", "2", "--seq", "8"]
    assert not main([*first, *options, "--save", save, "--steps", "3", "--lr", "1e-2"])
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert len(losses) == 3 and losses[2] < losses[0]
    exported = tmp_path / "exported"
    assert not main(["export", save, str(exported)])
    assert bridge.plan(exported).config.model_type == hf_fields(family)["model_type"]


# Parameters that no gradient moves beside those that LoRA keeps: biases of routers, an
# indexer, scales of layers and experts of tokens.
@pytest.mark.parametrize(
    "family",
    ["nemotron_h", "glm_moe_dsa", "gemma4", "mamba2", "deepseek_v4", "zamba2"],
)
def test_factors_are_trained_beside_parameters_that_no_gradient_moves(
    family, directory, text, tmp_path
):
    model, save, out = directory(family), str(tmp_path / "save"), tmp_path / "out"
    options = ["--data", str(text), "--devices", "1", "--batch", "2", "--seq", "8"]
    options += ["--save", save, "--lora-rank", "2", "--lr", "1e-2", "--steps", "2"]
    assert not main(["train", "--hf", model, *options])
    assert not main(["export", save, str(out)])
    before, after = (load_file(Path(path) / NAME) for path in (model, out))
    moved = {key for key in before if (before[key] != after[key]).any()}
    assert moved and not any(word in key for key in moved for word in KEPT)


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_heads_that_ranks_cannot_share_are_named(
    family, command, directory, text, tmp_path, capsys
):
    model = directory(family, weights=command == "train")
    options = {
        "plan": ["--config", model, "--gpus", "8", "--mesh", "tp=8", "--seq", "32"],
        "train": ["--hf", model, "--data", str(text), "--save", str(tmp_path / "run")],
    }[command]
    options += ["--tp", "8", "--steps", "1", "--seq", "16"] * (command == "train")
    assert main([command, *options]) == 2
    assert HYBRIDS[family] in capsys.readouterr().err


@pytest.mark.parametrize("family", WITHOUT_EXPERTS)
def test_options_of_experts_are_refused_for_hybrids_without(
    family, directory, text, tmp_path, capsys
):
    options = ["--data", str(text), "--save", str(tmp_path / "run"), "--steps", "1"]
    options += ["--capacity-factor", "1.25", "--seq", "16"]
    assert main(["train", "--hf", directory(family), *options]) == 2
    assert "--capacity-factor 1.25" in capsys.readouterr().err


@pytest.mark.plan
@pytest.mark.parametrize("family", ["mamba2", "lfm2", "deepseek_v4"])
def test_a_hybrid_is_planned_for_gpus_from_its_config_alone(
    family, directory, tmp_path
):
    model, file = directory(family, weights=False), tmp_path / "plan.json"
    options = ["--gpus", "8", "--seq", "32", "--batch", "8", "--json", str(file)]
    assert not main(["plan", "--config", model, *options])
    assert json.loads(file.read_text())
