"""The text part of a model of images is the model of its family, logit by logit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from bridge_helpers import load_model, logits_of, tensors_of
from helpers.errors import facts
from safetensors.numpy import save_file
from tiny_configs import SIZES
from tiny_models import hf_logits, randomize
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

import bridge
from bridge.families import FAMILIES, NAMES
from bridge.families._class_defaults import TEXT_DEFAULTS

pytestmark = pytest.mark.torch

RELATIVE = 2e-5  # as in test_logits.py: two float32 programs that sum in other orders
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 48}
MROPE = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 2, 2]}
TEXTS = {
    "qwen2_5_vl": {"rope_scaling": MROPE, "tie_word_embeddings": True},
    "qwen3_vl": {
        "head_dim": 12,
        "rope_parameters": MROPE | {"mrope_interleaved": True},
    },
    "qwen3_vl_moe": {
        "head_dim": 12,
        "rope_parameters": MROPE | {"mrope_interleaved": True},
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
    },
}


def written(path: Path, model_type: str) -> tuple[np.ndarray, np.ndarray]:
    """Writes a tiny model of images; returns tokens, and its logits of a text."""
    torch.manual_seed(0)
    text = {**SIZES, **TEXTS[model_type]}
    vision = VISION | ({"deepstack_visual_indexes": [0]} if "3" in model_type else {})
    config = CONFIG_MAPPING[model_type](
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )
    model = AutoModelForImageTextToText.from_config(config).eval()
    randomize(model, model_type)
    model.tie_weights()
    model.save_pretrained(path)
    tokens = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (2, 40))
    return tokens, hf_logits(model, tokens)


@pytest.mark.parametrize("model_type", TEXTS)
def test_logits_of_a_text_equal_those_of_the_model_of_images(tmp_path, model_type):
    tokens, theirs = written(tmp_path, model_type)
    with pytest.warns(UserWarning, match=facts("visual")):
        model = load_model(tmp_path)
    ours = np.asarray(logits_of(model, tokens))
    assert np.abs(ours - theirs).max() <= RELATIVE * np.abs(theirs).max()


def test_experts_of_images_are_published_transposed(tmp_path):
    tokens, theirs = written(tmp_path, "qwen3_vl_moe")
    tensors = {
        key: np.ascontiguousarray(tensor.swapaxes(1, 2))
        if ".experts." in key
        else tensor
        for key, tensor in tensors_of(tmp_path).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=facts("visual")):
        model = load_model(tmp_path)
    ours = np.asarray(logits_of(model, tokens))
    assert np.abs(ours - theirs).max() <= RELATIVE * np.abs(theirs).max()


def test_a_published_file_may_have_all_fields_beside_each_other():
    fields = SIZES | {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]},
        "vision_config": VISION,
        "image_token_id": 130,
    }
    config = bridge.from_hf_config(fields)
    assert (config.model_type, config.norm_eps) == ("qwen2", 1e-5)
    assert config.rope is not None
    assert (config.rope.rope_type, config.rope.rope_theta) == ("default", 1e6)


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_defaults_of_text_parts_are_those_of_transformers(kind):
    given, made = TEXT_DEFAULTS[kind], CONFIG_MAPPING[kind]()
    said = made.to_dict()
    said |= {"rope_theta": said["rope_parameters"]["rope_theta"]}
    if "num_experts" in given:  # of the class, under another name; all are normed
        said |= {"num_experts": made.num_experts, "norm_topk_prob": True}
    assert given == {name: said[name] for name in given}
    family = FAMILIES[NAMES[kind]]
    others = {
        name: field.default
        for name, field in family.fields.items()
        if name not in given and said.get(name) is not None
        if (name, field.default) != ("head_dim", None)  # as wide as the sizes say
    }
    assert others == {name: said[name] for name in others}
