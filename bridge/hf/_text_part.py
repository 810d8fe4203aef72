"""The text part of a multimodal config, read as a config of its own."""

from collections.abc import Mapping
from typing import Any

from bridge.families import FAMILIES
from bridge.families._class_defaults import CLASS_DEFAULTS

# Multimodal models whose text part is the very model of its family: transformers makes
# it of `text_config` alone, and texts without images attend as there. PaliGemma, say,
# is none of them: all of its prompt attends to all of it.
MULTIMODAL = frozenset(
    """
    aria aya_vision cohere2_vision deepseek_vl deepseek_vl_hybrid fast_vlm gemma3
    got_ocr2 idefics2 idefics3 internvl janus kimi_k25 lighton_ocr llama4 llava
    llava_next llava_next_video llava_onevision mistral3 modernvbert ovis2 perception_lm
    qianfan_ocr qwen2_audio qwen3_5 qwen3_5_moe smolvlm video_llama_3 video_llava
    vipllava voxtral
    """.split()
)
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
    text, model_type = fields.get("text_config"), fields.get("model_type")
    if not is_multimodal(fields) or not isinstance(text, Mapping):
        return fields
    kind = str(text.get("model_type"))
    if model_type not in MULTIMODAL or kind not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} with a text_config of model_type {kind!r} is "
            f"not supported. Text parts are read of {', '.join(sorted(MULTIMODAL))}, "
            f"where they are one of {', '.join(sorted(FAMILIES))}."
        )
    shared = {name: fields[name] for name in _SHARED if name in fields}
    if not any(text.get(name) for name in _DTYPES):
        shared |= {name: fields[name] for name in _DTYPES if name in fields}
    return {**CLASS_DEFAULTS.get(kind, {}), **shared, **text}


def is_multimodal(fields: Mapping[str, Any]) -> bool:
    """Returns whether fields are those of a model with a text part."""
    return (
        isinstance(fields.get("text_config"), Mapping)
        and fields.get("model_type") not in FAMILIES
    )


def quantization_of(fields: Mapping[str, Any]) -> Any:
    """Returns `quantization_config` of a config, or of its text part."""
    text = fields.get("text_config") if is_multimodal(fields) else None
    of_text = text.get("quantization_config") if isinstance(text, Mapping) else None
    return of_text or fields.get("quantization_config")
