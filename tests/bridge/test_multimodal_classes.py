"""Logits of texts of each multimodal class are those of the model of its family."""

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from bridge_helpers import load_model, logits_of
from tiny_configs import MINIMAX_M3, SIZES
from tiny_models import randomize
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from bridge.hf._text_part import MULTIMODAL

pytestmark = pytest.mark.torch

RELATIVE = 2e-5  # as in test_logits.py: two float32 programs that sum in other orders
_QWEN_VISION = {
    "vision_config": {
        **{"hidden_size": 32, "num_heads": 2, "intermediate_size": 32},
        "out_hidden_size": 48,
    }
}
_SIGLIP = {
    "vision_config": {
        **{"model_type": "siglip_vision_model", "hidden_size": 64},
        **{"num_attention_heads": 2, "intermediate_size": 32},
        **{"image_size": 28, "patch_size": 14},
    }
}
_AUDIO = {"audio_config": {"d_model": 32, "encoder_ffn_dim": 32, "output_dim": 48}}
_OMNI = {
    "vision_config": _QWEN_VISION["vision_config"]
    | {"embed_dim": 32, "deepstack_visual_indexes": [0]},
    "audio_config": _AUDIO["audio_config"] | {"encoder_attention_heads": 2},
}
_MINICPM = {
    "vision_config": {
        **{"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    }
}
_VIBEVOICE = {"num_filters": 4, "depths": [1] * 7}
# What makes the parts other than the text small, or fits them to it.
OTHER_PARTS: dict[str, dict[str, Any]] = {
    "aya_vision": _SIGLIP,
    "cohere2_vision": _SIGLIP,
    "exaone4_5": {
        "vision_config": _QWEN_VISION["vision_config"] | {"num_key_value_heads": 2}
    },
    "cohere_compass": {
        "vision_config": _QWEN_VISION["vision_config"]
        | {"deepstack_visual_indexes": [0]}
    },
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 48, "intermediate_size": 12}},
    "granite_docling": {"vision_config": {"out_hidden_size": 48}},
    "glm46v": _QWEN_VISION,
    "glm_ocr": _QWEN_VISION,
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0],
        "downsample_rate": "1/2",
    },
    "glmga": _QWEN_VISION,
    "glm4v": _QWEN_VISION,
    "glm4v_moe": _QWEN_VISION,
    "hyperclovax_vision_v2": _QWEN_VISION,
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM,
}
_FULL_LAST = {"layer_types": ["linear_attention", *["full_attention"] * 2]}
_UNSCALED = {"logit_scale": 1.0}  # which transformers leaves out of these two
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
_HALF = _MROPE | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
TEXTS: dict[str, dict[str, Any]] = {
    "cohere_compass": {
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "default", "rope_theta": 1e4},
                **{"mrope_section": [2, 2, 2], "mrope_interleaved": True},
            }
        }
    },
    "fuyu": {"num_key_value_heads": 4},
    "glm_ocr": {"rope_parameters": _MROPE},
    "glmga": {"rope_parameters": _HALF},
    "hunyuan_vl": {"head_dim": 12, "rope_parameters": _MROPE},
    "paddleocr_vl": {"head_dim": 12, "rope_parameters": _MROPE, "use_bias": False},
    "glm46v": {"rope_parameters": _HALF},
    "minimax_m3_vl": {
        **MINIMAX_M3,
        # transformers reads it of `rope_parameters` alone here.
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "mllama": {"cross_attention_layers": [1], "pad_token_id": 0},
    "glm4v": {"rope_parameters": _MROPE},
    "glm4v_moe": {"rope_parameters": _HALF, "n_routed_experts": 4, **_EXPERTS},
    "qwen2_5_omni_thinker": {"rope_parameters": _MROPE},
    "qwen3_omni_moe_thinker": {
        "rope_parameters": _MROPE | {"mrope_interleaved": True},
        "num_experts": 4,
        **_EXPERTS,
    },
    "aya_vision": _UNSCALED,
    "cohere2_vision": _UNSCALED,
    "minicpm_ocr": _FULL_LAST,
    "minicpmv4_6": _FULL_LAST,
    "minicpmv4_7": _FULL_LAST,
}
_OPT = {"ffn_dim": 80, "word_embed_proj_dim": 48}
# The text part that a class has, where its own default is another one.
KINDS = {"mistral3": "ministral3"}
# One of each way to say and to name a text part; the others are long tests.
MOST_UNLIKE = (
    *("aya_vision", "blip-2", "exaone4_5", "gemma3", "glm4v", "glm4v_moe", "glmasr"),
    *("granite_speech", "internvl", "lfm2_vl", "llava", "minicpmv4_6", "mistral3"),
    *("minimax_m3_vl", "mllama"),
    *("nemotron_h_omni", "qwen2_audio", "qwen3_asr", "qwen3_omni_moe_thinker"),
)
OTHERS = (
    *(
        "cohere_compass",
        "fuyu",
        "glm_ocr",
        "glmga",
        "granite4_vision",
        "hunyuan_vl",
        "paddleocr_vl",
    ),
    *("audioflamingo3", "cohere2_vision", "deepseek_vl", "fun_asr_nano", "glm46v"),
    *("gemma4_unified", "got_ocr2", "granite_docling"),
    *("granite_speech_plus", "hyperclovax_vision_v2", "idefics2", "idefics3"),
    *("instructblip", "instructblipvideo", "janus", "lfm3_vl", "lighton_ocr"),
    *("llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr"),
    *("minicpmv4_7", "moss_transcribe_diarize", "musicflamingo", "omniasr", "ovis2"),
    *("pp_chart2table", "shieldgemma2", "smolvlm", "video_llama_3", "video_llava"),
    *("qwen2_5_omni_thinker", "vibevoice_asr", "vipllava", "voxtral"),
)
_MAPPINGS = (
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
_LAYERS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers")


_THINKERS = {
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
}


def class_of(model_type: str) -> Any:
    name = _THINKERS.get(model_type) or next(
        names[model_type] for names in _MAPPINGS if model_type in names
    )
    return getattr(transformers, name)


def with_one_layer(config: Any) -> None:
    """Leaves one layer in all parts other than the text."""
    for name, part in vars(config).items():
        if hasattr(part, "to_dict") and name != "text_config":
            for layers in _LAYERS:
                if isinstance(getattr(part, layers, None), int):
                    setattr(part, layers, 1)
            with_one_layer(part)


def tiny_text(model_type: str, kind: str) -> dict[str, Any]:
    fields = {**SIZES, **TEXTS.get(model_type, {}), "model_type": kind}
    if kind == "opt":
        mine = ("num_key_value_heads", "intermediate_size", "rms_norm_eps")
        fields = {k: v for k, v in fields.items() if k not in mine} | _OPT
    return fields


def write(path: Path, model_type: str) -> tuple[np.ndarray, np.ndarray]:
    """Writes a tiny model; returns tokens, and its logits of them without images."""
    torch.manual_seed(0)
    make = CONFIG_MAPPING[model_type]
    kind = KINDS.get(model_type) or make().text_config.model_type
    others = OTHER_PARTS.get(model_type, {})
    config = make(text_config=tiny_text(model_type, kind), **others)
    with_one_layer(config)
    model = class_of(model_type)(config).eval()
    randomize(model, model_type)
    model.tie_weights()
    model.save_pretrained(path)
    tokens = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (2, 24))
    # BLIP's classes need an image, and are their text part without one.
    called = model.language_model if "blip" in model_type else model
    with torch.no_grad():
        logits = called(input_ids=torch.from_numpy(tokens)).logits
    return tokens, logits.float().numpy()


@pytest.mark.parametrize(
    "model_type",
    [*MOST_UNLIKE, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)],
)
def test_logits_of_texts_are_those_of_the_family(tmp_path, model_type):
    assert model_type in MULTIMODAL
    tokens, theirs = write(tmp_path, model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # parts that are left out
        ours = np.asarray(logits_of(load_model(tmp_path), jax.numpy.asarray(tokens)))
    assert np.abs(ours - theirs).max() <= RELATIVE * np.abs(theirs).max()
