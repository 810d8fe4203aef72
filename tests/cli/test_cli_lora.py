"""`fsdp-jax train --lora-rank`: trained, resumed, exported merged and as an adapter."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import bridge
import fsdp_jax as fsdp
from fsdp_jax.cli import main
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._model_source import HuggingFace, Megatron, name_for_adapters

LORA = ["--lora-rank", "2", "--lora-alpha", "8", "--base-dtype", "nf4"]


def train(folder: Path, text: Path, steps: int, *options: str) -> list[float]:
    metrics = folder / f"{steps}.jsonl"
    status = main(
        ["train", "--data", str(text), "--steps", str(steps), "--save-every", "2"]
        + ["--save", str(folder / f"save{steps}"), "--metrics", str(metrics), *options]
    )
    assert status == 0
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory, llama, text):
    """(folder, losses of four steps of LoRA)."""
    folder = tmp_path_factory.mktemp("lora")
    options = ["--hf", str(llama), "--batch", "8", "--seq", "16", "--lr", "1e-2", *LORA]
    return folder, train(folder, text, 4, *options)


def test_it_learns_and_goes_on_where_it_was(run, llama, text):
    folder, losses = run
    assert losses[-1] < losses[0]
    place = ["--resume", str(folder / "save4"), "--devices", "4"]
    again = train(folder, text, 5, *place, "--resume-step", "2")
    np.testing.assert_allclose(again[:2], losses[2:], rtol=1e-5)
    adapter = folder / "resumed"
    assert main(["export", str(folder / "save5"), str(adapter), "--adapter"]) == 0
    written = json.loads((adapter / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(llama)


def test_the_same_command_again_knows_its_run(run, llama, text):
    folder, _ = run
    options = ["--hf", str(llama), "--batch", "8", "--seq", "16", "--lr", "1e-2", *LORA]
    command = ["train", "--data", str(text), "--steps", "4", "--save-every", "2"]
    place = ["--save", str(folder / "save4"), "--metrics", str(folder / "4.jsonl")]
    assert main([*command, *place, *options]) == 0


def test_an_exported_adapter_is_the_merged_model(run, llama):
    folder, _ = run
    save = str(folder / "save4")
    assert main(["export", save, str(folder / "merged")]) == 0
    assert main(["export", save, str(folder / "adapter"), "--adapter"]) == 0
    config = bridge.from_hf_config(llama)
    factors = bridge.load_lora(folder / "adapter", config)
    assert factors.config.scale("model.layers.0.self_attn.q_proj") == 4
    assert len(factors.factors) == 7  # every linear module of a layer
    plan = plan_decoder(config, fsdp.make_mesh())
    ours = bridge.load_hf(folder / "merged", plan.params)
    base = bridge.load_hf(llama, plan.params)
    theirs = bridge.load_hf_with_lora(llama, folder / "adapter", plan.params)
    # The base was kept in 4 bits: each element is off by up to a sixth of its block's
    # largest, and the factors add to that what they add to the exact one.
    for a, b, c in zip(*map(jax.tree.leaves, (ours, theirs, base)), strict=True):
        moved, off = np.abs(np.asarray(b) - c).max(), np.abs(np.asarray(a) - b).max()
        assert off <= np.abs(c).max() / 6 + 1e-6
        assert a.ndim < 3 or moved > 1e-3  # layers of matrices have moved


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--lora-alpha", "8"], "--lora-alpha needs --lora-rank"),
        (["--base-dtype", "nf4"], "--base-dtype needs --lora-rank"),
        (["--lora-rank", "-1"], "--lora-rank -1 must be at least 1"),
        (["--lora-rank", "2", "--lora-targets", "no_proj"], "no modules no_proj"),
    ],
)
def test_what_makes_no_sense_is_refused(options, reason, llama, text, tmp_path, capsys):
    command = ["train", "--hf", str(llama), "--data", str(text), "--steps", "1"]
    assert main([*command, "--save", str(tmp_path / "save"), *options]) == 2
    assert reason in capsys.readouterr().err


def test_another_adapter_does_not_go_on_with_a_run(run, text, tmp_path, capsys):
    folder, _ = run
    command = ["train", "--resume", str(folder / "save4"), "--data", str(text)]
    command += ["--steps", "6", "--save", str(tmp_path / "save"), "--lora-rank", "4"]
    assert main(command) == 2
    assert "--lora-rank 4 (saved with 2)" in capsys.readouterr().err


def test_a_run_without_lora_has_no_adapter(trained, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["export", str(trained.save), out, "--adapter"]) == 2
    assert "was not trained with --lora-rank" in capsys.readouterr().err


def test_an_adapter_names_models_of_text_alone(llama, tmp_path):
    config = bridge.from_hf_config(llama)
    origin = HuggingFace(llama, config)
    assert name_for_adapters(origin, str(llama)) == str(llama)
    assert name_for_adapters(origin, "meta-llama/Llama-3.2-1B") == (
        "meta-llama/Llama-3.2-1B"
    )
    assert name_for_adapters(Megatron(llama, config), str(llama)) is None
    assert name_for_adapters(origin, None) is None
    seeing = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(seeing))
    assert name_for_adapters(HuggingFace(tmp_path, config), str(tmp_path)) is None
