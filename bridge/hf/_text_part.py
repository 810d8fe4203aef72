"""The text part of a multimodal config, read as a config of its own."""

from collections.abc import Mapping
from typing import Any

from bridge.families import FAMILIES, NAMES
from bridge.families._class_defaults import CLASS_DEFAULTS, TEXT_DEFAULTS
from bridge.hf._config_file import THINKER

# Multimodal models whose text part is the very model of its family: transformers makes
# it of `text_config` alone, and texts without images attend as there.
MULTIMODAL = frozenset(
    """
    aria audioflamingo3 aya_vision blip-2 cohere2_vision cohere_compass deepseek_vl
    deepseek_vl_hybrid exaone4_5 fast_vlm fun_asr_nano fuyu gemma3 gemma3n gemma4
    gemma4_unified glm46v glm4v glm4v_moe glm_ocr glmasr glmga got_ocr2 granite4_vision
    granite_docling granite_speech granite_speech_plus hunyuan_vl hyperclovax_vision_v2
    idefics2 idefics3 instructblip instructblipvideo internvl janus kimi_k25 lfm2_vl
    lfm3_vl lighton_ocr llama4 llava llava_next llava_next_video llava_onevision
    minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mllama
    moss_transcribe_diarize musicflamingo nemotron_h_omni omniasr ovis2 paddleocr_vl
    perception_lm pp_chart2table qianfan_ocr qwen2_5_omni qwen2_5_omni_thinker
    qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr qwen3_omni_moe
    qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe shieldgemma2 smolvlm vibevoice_asr
    video_llama_3 video_llava vipllava voxtral
    """.split()
)
# Why the text part of another is not the model of its family.
_OTHERWISE = {
    "paligemma": " The tokens of its prompts attend to those behind them as well."
}
# Multimodal models whose published files have the fields of the text part beside those
# of the others.
_FLAT = {
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "paddleocr_vl": "paddleocr_vl_text",
    "hunyuan_vl": "hunyuan_vl_text",
}
# Text parts of published files that do not say their model_type.
_UNNAMED = {"minimax_m3_vl": "minimax_m3_vl_text"}
# How three positions of an image share the rotary dims; those of texts are equal.
_OF_IMAGES = ("mrope_section", "mrope_interleaved", "xdrope_section")
# Types of such ropes, and what they are of texts.
_PLAIN_TYPES = {"mrope": "default", "xdrope": "dynamic"}
_ROPES = ("rope_parameters", "rope_scaling")
_SHARED = (
    *("quantization_config", "tie_word_embeddings", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
_DTYPES = ("dtype", "torch_dtype")


def text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields of the text part of a multimodal config, else all fields.

    transformers 4 leaves fields out of `text_config` that have the default of their
    class; some others are said of the entire model.

    Args:
      fields: All fields of a `config.json`.

    Raises:
      ValueError: If the config is multimodal, and its text part is not known to be the
        model of its family.
    """
    fields = _with_text(fields)
    model_type, text = fields.get("model_type"), _text_of(fields)
    if text is None:
        return fields
    kind = str(text.get("model_type"))
    if model_type not in MULTIMODAL or kind not in NAMES:
        raise ValueError(
            f"model_type {model_type!r} with a text_config of model_type {kind!r} is "
            f"not supported. Text parts are read of {', '.join(sorted(MULTIMODAL))}, "
            f"where they are one of {', '.join(sorted(NAMES))}."
            + _OTHERWISE.get(str(model_type), "")
        )
    shared = {name: fields[name] for name in _SHARED if name in fields}
    if not any(text.get(name) for name in _DTYPES):
        shared |= {name: fields[name] for name in _DTYPES if name in fields}
    defaults = TEXT_DEFAULTS.get(kind) or CLASS_DEFAULTS.get(NAMES[kind], {})
    known = FAMILIES[NAMES[kind]].fields
    defaults = {
        name: value
        for name, value in defaults.items()
        if name not in known or text.keys().isdisjoint(known[name].aliases)
    }
    return _with_ropes_of_texts({**defaults, **shared, **text})


def is_multimodal(fields: Mapping[str, Any]) -> bool:
    """Returns whether fields are those of a model with a text part."""
    return _text_of(_with_text(fields)) is not None


def quantization_of(fields: Mapping[str, Any]) -> Any:
    """Returns `quantization_config` of a config, or of its text part."""
    fields = _with_text(fields)
    text = _text_of(fields) or {}
    return text.get("quantization_config") or fields.get("quantization_config")


def _with_text(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields around a text part: of a model that speaks, its thinker's."""
    thinker = fields.get(THINKER)
    if not isinstance(thinker, Mapping):
        return fields
    return {**thinker, **{k: v for k, v in fields.items() if k != THINKER}}


def _text_of(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the fields that are the text part's own; None of a model of texts."""
    text, model_type = fields.get("text_config"), fields.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return None
    if isinstance(text, Mapping):
        named = {"model_type": _UNNAMED[model_type]} if model_type in _UNNAMED else {}
        return {**named, **text}
    if isinstance(model_type, str) and model_type in _FLAT:
        # The class is the one of the entire model.
        text = {name: v for name, v in fields.items() if name != "architectures"}
        return {**text, "model_type": _FLAT[model_type]}
    return None


def _with_ropes_of_texts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields, their ropes without what is of images alone."""
    ropes = {
        name: {
            key: _PLAIN_TYPES.get(str(value), value)
            for key, value in fields[name].items()
            if key not in _OF_IMAGES
        }
        for name in _ROPES
        if isinstance(fields.get(name), Mapping)
    }
    return {**fields, **ropes}
