"""The text part of a model of images is the model of its family, logit by logit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from bridge_helpers import (
    HF_CONFIG,
    assert_same_leaves,
    like_of,
    load_model,
    logits_of,
    random_tensors,
    tensors_of,
    write_llama,
)
from helpers.errors import facts
from safetensors.numpy import save_file
from tiny_configs import SIZES
from tiny_models import hf_logits, make_model, randomize
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


@pytest.mark.parametrize(
    "changes, family, turned",
    [
        (
            {"model_type": "paddleocr_vl", "rope_theta": 5e5, "use_3d_rope": True},
            "llama",
            ("default", 5e5, None),
        ),
        (
            {
                "model_type": "hunyuan_vl",
                "attention_head_dim": 12,
                "head_dim": 12,
                "rope_scaling": {
                    **{"type": "xdrope", "xdrope_section": [2, 2, 1, 1]},
                    **{"alpha": 1000.0, "factor": 1.0, "mscale": 1.0},
                },
            },
            "hunyuan_v1_dense",
            ("ntk_alpha", 1e4, 1000.0),
        ),
    ],
)
def test_text_recognizers_say_all_fields_beside_each_other(changes, family, turned):
    other_parts = {"vision_config": VISION, "image_token_id": 130}
    config = bridge.from_hf_config(SIZES | other_parts | changes)
    assert config.model_type == family
    assert config.rope is not None
    found = config.rope
    assert (found.rope_type, found.rope_theta, found.alpha) == turned


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
    if kind == "qwen2_5_omni_text":
        # Not read by transformers 5, which ties as the thinker says; 4 had False.
        made.tie_word_embeddings = False
    # What layers take where their class has no such field.
    said = {"head_dim": None, "partial_rotary_factor": 1.0, "eos_token_id": None}
    said |= {"hidden_size_per_layer_input": 0}
    if kind == "glm_ocr_text":
        said |= {"attention_bias": False}
    said |= made.to_dict()
    said |= {"rope_theta": said["rope_parameters"].get("rope_theta")}
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


def disagreeing(path: Path, *, head: bool, around: bool, speaks: bool) -> Path:
    """Writes a multimodal Llama whose two fields differ on whether the head is tied."""
    tensors = random_tensors(np.float32)
    if not head:
        del tensors["lm_head.weight"]
    prefix = "thinker" if speaks else "language_model"
    tensors = {f"{prefix}.{key}": value for key, value in tensors.items()}
    write_llama(path, tensors=tensors)
    text = HF_CONFIG | {"tie_word_embeddings": not around}
    fields = {"text_config": text, "tie_word_embeddings": around}
    fields = {"thinker_config": fields} if speaks else fields
    model_type = "qwen2_5_omni" if speaks else "llava"
    fields = {"model_type": model_type, **fields}
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("speaks", [False, True])
@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_files_say_whether_a_head_is_tied_where_two_fields_differ(
    tmp_path, head, around, speaks
):
    path = disagreeing(tmp_path / "model", head=head, around=around, speaks=speaks)
    config = bridge.from_hf_config(path)
    assert config.tie_word_embeddings is not head
    params = bridge.load_hf(path, like_of(config))
    assert ("lm_head" in params) is head
    file = path / "config.json"  # without weights: what the text part says
    assert bridge.from_hf_config(file).tie_word_embeddings is not around


@pytest.mark.parametrize("head", [True, False])
def test_files_say_whether_a_head_is_tied_where_no_field_does(tmp_path, head):
    path = disagreeing(tmp_path / "model", head=head, around=True, speaks=False)
    fields = json.loads((path / "config.json").read_text())
    del fields["tie_word_embeddings"], fields["text_config"]["tie_word_embeddings"]
    (path / "config.json").write_text(json.dumps(fields))
    config = bridge.from_hf_config(path)
    assert config.tie_word_embeddings is not head
    assert ("lm_head" in bridge.load_hf(path, like_of(config))) is head


def test_a_config_without_its_weights_is_read_as_it_is(tmp_path):
    fields = {"model_type": "llava", "text_config": dict(HF_CONFIG)}
    fields["text_config"].pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    index = {"weight_map": {"language_model.model.norm.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert bridge.from_hf_config(tmp_path) == bridge.from_hf_config(fields)


def test_exaone_4_5_names_its_text_part_as_it_was_published():
    text = SIZES | {
        "model_type": "exaone4_5_text",
        "architectures": ["Exaone4ForCausalLM"],
        "layer_types": [*["sliding_attention"] * 2, "full_attention"],
        "sliding_window": 8,
        "sliding_window_pattern": "LLG",
        "num_nextn_predict_layers": 1,
        "mtp_share_layers": True,
        "rope_scaling": {"rope_type": "default", "rope_theta": 1e6},
    }
    fields = {"model_type": "exaone4_5", "text_config": text}
    config = bridge.from_hf_config(fields)
    assert config.model_type == "exaone4"
    assert config.rope is not None and config.rope.rope_theta == 1e6
    said = {"num_nextn_predict_layers", "mtp_share_layers"}
    assert bridge.left_out_fields(fields).keys() == said


def test_of_a_model_that_speaks_its_thinker_is_read(tmp_path):
    plain, omni = tmp_path / "plain", tmp_path / "omni"
    make_model(plain, "qwen2")
    fields = json.loads((plain / "config.json").read_text())
    tensors = {f"thinker.{key}": value for key, value in tensors_of(plain).items()}
    tensors |= {
        key.replace("thinker.", "talker.", 1): value + 1
        for key, value in tensors.items()
        if ".layers.0." in key
    }
    omni.mkdir()
    save_file(tensors, omni / "model.safetensors")
    text = fields | {"model_type": "qwen2_5_omni_text"}
    talker = {"text_config": fields | {"num_hidden_layers": 1}}
    config = {
        "model_type": "qwen2_5_omni",
        "thinker_config": {"text_config": text, "audio_config": {}},
        "talker_config": talker,
    }
    (omni / "config.json").write_text(json.dumps(config))
    read = bridge.from_hf_config(omni)
    assert read == bridge.from_hf_config(plain)
    with pytest.warns(UserWarning, match=facts("talker")):
        loaded = bridge.load_hf(omni, like_of(read))
    assert_same_leaves(loaded, bridge.load_hf(plain, like_of(read)))
