"""Score heads: one number a row, in place of logits, as reward models have them."""

import dataclasses
from typing import Any, Literal

from bridge.hf._config import find_family, to_hf_config
from bridge.models import DecoderConfig
from bridge.rules._mapping import Mapping
from bridge.rules._rules import Rule

Head = Literal["lm_head", "score"]
"""Head of a decoder: logits of tokens, or a score of a row."""

_SCORE = Rule("score.weight", "score.kernel", "one embed -> embed one")
_CAUSAL, _SCORED = "ForCausalLM", "ForSequenceClassification"
# Whose class with a score has another name than the one with logits.
_OTHER_NAMES = {
    "gpt2": "GPT2ForSequenceClassification",
    "openai-gpt": "OpenAIGPTForSequenceClassification",
    "cohere_compass_text": "CohereCompassTextForSequenceClassification",
    "gemma3_text": "Gemma3TextForSequenceClassification",
    "qwen3_5_text": "Qwen3_5TextForSequenceClassification",
}
# Whose class with a score has a projection and a norm of its own before it.
_TRANSFORMED = frozenset({"modernbert-decoder"})
# Model types for which transformers has no class with a score.
_WITHOUT = frozenset(
    {"apertus", "cohere", "cohere2", "dots1", "ernie4_5", "ernie4_5_moe", "falcon_h1"}
    | {"glm4_moe", "glm4_moe_lite", "granite", "granitemoe", "granitemoehybrid"}
    | {"granitemoeshared", "internlm3", "lfm2", "llama4_text", "mamba", "mamba2"}
    | {"minimax_m2", "nemotron_h", "olmoe", "qwen3_5_moe_text", "deepseek_v32"}
    | {"gemma3n_text", "gemma4_text", "glm_moe_dsa", "lfm2_moe", "cwm", "vaultgemma"}
    | {"youtu", "exaone", "hyperclovax", "iquestcoder", "jais2", "granite_swa"}
    | {"granitemoe_swa", "solar_open", "sarvam_moe", "sarvam_mla", "mellum"}
    | {"exaone_moe", "flex_olmo", "hy_v3", "afmoe", "bamba", "nanochat"}
    | {"falcon_mamba", "codegen", "dbrx", "deepseek", "flint", "kolibri1"}
    | {"lfm3", "nemotron-nas", "minimax_m3_vl_text", "deepseek_v4"}
    | {"longcat_flash", "mimo_v2_flash", "kimi_linear", "cohere2_moe"}
    | {"olmo_hybrid", "recurrent_gemma", "xglm", "aria_text", "bitnet", "lara_mini"}
    | {"bailing_hybrid", "laguna", "mllama_text_model", "hy_v4"}
)


def without_head(config: DecoderConfig) -> DecoderConfig:
    """Returns the config of a decoder without parameters of an output projection."""
    return dataclasses.replace(config, tie_word_embeddings=True, head_bias=False)


def mapping_with_head(config: DecoderConfig, head: Head) -> Mapping:
    """Returns the rules of a model with a head.

    Args:
      config: Config of the model with logits.
      head: Its head; a score is `score.kernel` of shape [embed, 1].
    """
    family = find_family(config.model_type)
    if head == "lm_head":
        return family.mapping(config)
    mapping = family.mapping(without_head(config))
    return dataclasses.replace(mapping, rules=(*mapping.rules, _SCORE))


def fields_with_head(config: DecoderConfig, head: Head) -> dict[str, Any]:
    """Returns the fields of `config.json` of a model with a head.

    Args:
      config: Config of the model with logits.
      head: Its head.

    Raises:
      ValueError: If transformers has no class of the family with a score.

    Source: transformers `modeling_layers.py::GenericForSequenceClassification`.
    """
    fields = to_hf_config(config)
    if head == "lm_head":
        return fields
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**fields, **labels, "architectures": [_scored_architecture(config)]}


def _scored_architecture(config: DecoderConfig) -> str:
    name = config.model_type
    if name in _WITHOUT:
        raise ValueError(
            f"model_type {name!r}: transformers has no class of it with a score, so "
            "that nothing could load the model. Export one of a family that has, such "
            "as llama or qwen3."
        )
    if name in _TRANSFORMED:
        raise ValueError(
            f"model_type {name!r}: transformers' class of it with a score transforms "
            "the states before it, which is not modelled. Export one of a family whose "
            "class does not, such as llama or qwen3."
        )
    usual = find_family(name).architecture.replace(_CAUSAL, _SCORED)
    return _OTHER_NAMES.get(name, usual)
