"""Every command reads a published checkpoint: its names, its fields, its codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fsdp_jax.cli import main

REMOTE = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
VISION = {"vision_tower.norm.weight": np.ones(5, np.float32)}
IGNORE = ["--ignore-field", "mystery"]
SMALL = ["--seq", "8", "--devices", "1"]


@pytest.fixture(scope="module")
def published(tmp_path_factory, llama) -> Path:
    """The text part of a LLaVA, with int8 weights and a field of remote code."""
    path = tmp_path_factory.mktemp("published")
    fields = json.loads((llama / "config.json").read_text())
    text = {name: v for name, v in fields.items() if name != "architectures"}
    config = {
        "model_type": "llava",
        "text_config": text | {"auto_map": REMOTE, "mystery": 1},
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    }
    (path / "config.json").write_text(json.dumps(config))
    tensors = dict(VISION)
    for key, array in load_file(llama / "model.safetensors").items():
        name = f"language_model.{key}"
        if "_proj" in key:
            scales = np.abs(array).max(axis=1)
            array = np.rint(array / scales[:, None] * 127).astype(np.int8)
            tensors[name.removesuffix("weight") + "SCB"] = scales
        tensors[name] = array
    save_file(tensors, path / "model.safetensors")
    return path


def commands(published: Path, text: Path, out: Path) -> dict[str, list[str]]:
    model, data = str(published), ["--data", str(text), *SMALL]
    return {
        "inspect": [model, "--json"],
        "import": [model, str(out)],
        "convert": [model, str(out), "--to", "hf"],
        "compare": [model, model, "--against", "bridge", *SMALL],
        "eval": [model, *data],
        "generate": [model, "--prompt", "1", "--max-new-tokens", "2", *SMALL[2:]],
        "train": ["--hf", model, *data, "--steps", "1", "--save", str(out)],
        # Stops behind the config: to compile would take a minute.
        "plan": ["--config", model, "--gpus", "8", "--batch", "3"],
    }


NAMES = tuple(commands(Path(), Path(), Path()))


@pytest.mark.parametrize("name", NAMES)
def test_a_field_of_remote_code_is_refused_by_each_command(
    name, published, text, tmp_path, capsys
):
    argv = commands(published, text, tmp_path / "out")[name]
    assert main([name, *argv]) == 2
    assert "--ignore-field mystery" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_each_command_ignores_it_when_told_and_reads_the_text_part(
    name, published, text, tmp_path, capsys, recwarn
):
    argv = commands(published, text, tmp_path / "out")[name]
    planned = name == "plan"  # from the config alone
    assert main([name, *argv, *IGNORE]) == (2 if planned else 0)
    printed = capsys.readouterr().err
    assert "mystery = 1" in printed and "--ignore-field" not in printed
    told = {str(warning.message) for warning in recwarn}
    assert len([line for line in told if "vision_tower" in line]) == (not planned)


def test_what_is_converted_is_what_the_codes_stand_for(published, llama, tmp_path):
    argv = ["convert", str(published), str(tmp_path / "out"), "--to", "hf", *IGNORE]
    with pytest.warns(UserWarning):
        assert main(argv) == 0
    plain = load_file(llama / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == sorted(plain)
    for key, array in plain.items():
        # Half a step of the largest magnitude's 127th, and its rounding.
        largest = np.abs(array).max(axis=-1, keepdims=True)
        step = largest / 127 if "_proj" in key else np.zeros_like(largest)
        assert (np.abs(found[key] - array) <= step * 0.501).all(), key
