"""ChatGLM 2 and 3, and GLM-4-9B of 2024: GLM under the names of Megatron.

Source: THUDM/glm-4-9b-chat `configuration_chatglm.py`, `modeling_chatglm.py`;
transformers `convert_glm_weights_to_hf.py`.
"""

import dataclasses
from typing import Any

from bridge.families import glm
from bridge.families._blocks import Rules, attention_out, linear, norms, outside
from bridge.families._family import Field, KeyMapping, Layers
from bridge.families._fused import qkv_in_turn
from bridge.families.releases._read import Fields, reads, without
from bridge.models import DecoderConfig, LayerKind, RopeConfig
from bridge.rules._rules import Rule

_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
}
_GLM_4 = 151552
"""Tokens of GLM-4."""


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return (
        *qkv_in_turn(config, "self_attention.query_key_value"),
        *attention_out(config, "self_attention.dense"),
        Rule(
            "mlp.dense_h_to_4h.weight",
            ("mlp.gate_proj.kernel", "mlp.up_proj.kernel"),
            ("mlp embed -> embed mlp",) * 2,
        ),
        *linear("mlp.dense_4h_to_h", "mlp.down_proj", "embed mlp -> mlp embed"),
        *norms(_NORMS),
    )


def _read_rope(fields: Fields) -> dict[str, Any]:
    ratio, vocab = fields["rope_ratio"], fields["vocab_size"]
    if ratio != 1 and vocab != _GLM_4:
        raise ValueError(
            f"rope_ratio = {ratio!r} with {vocab} tokens: the code of GLM-4, of "
            f"{_GLM_4}, multiplies the base of the rope by it, and that of ChatGLM "
            "2 and 3 for long texts differs by release; only 1 is modelled of these"
        )
    return {
        "rope": RopeConfig(10000.0 * ratio, interleaved=True, partial_rotary_factor=0.5)
    }


def _read_groups(fields: Fields) -> dict[str, Any]:
    groups = (
        fields["multi_query_group_num"] if fields["multi_query_attention"] else None
    )
    return {"num_key_value_heads": groups}


FAMILY = dataclasses.replace(
    glm.FAMILY,
    model_type="chatglm",
    architecture="ChatGLMModel",
    also_architectures=("ChatGLMForConditionalGeneration",),
    written_as=glm.FAMILY.model_type,
    fields={
        **without(
            glm.FAMILY.fields,
            *("num_key_value_heads", "vocab_size", "num_hidden_layers"),
            *("intermediate_size", "max_position_embeddings", "rms_norm_eps"),
            *("head_dim", "attention_bias"),
        ),
        "vocab_size": Field(65024, aliases=("padded_vocab_size",)),
        "num_hidden_layers": Field(28, aliases=("num_layers",)),
        "intermediate_size": Field(13696, aliases=("ffn_hidden_size",)),
        "max_position_embeddings": Field(2048, aliases=("seq_length",)),
        "rms_norm_eps": Field(1e-5, "norm_eps", ("layernorm_epsilon",)),
        "head_dim": Field(128, aliases=("kv_channels",)),
        "attention_bias": Field(False, aliases=("add_qkv_bias",)),
    },
    transforms=(
        reads(_read_rope, {"rope_ratio": 1}),
        reads(
            _read_groups,
            {"multi_query_attention": False, "multi_query_group_num": 1},
        ),
    ),
    fixed={
        "add_bias_linear": False,
        "apply_residual_connection_post_layernorm": False,
        "fp32_residual_connection": False,
        "interleaved_qkv": False,
        "original_rope": True,
        "post_layer_norm": True,
        "rmsnorm": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "pre_seq_len": None,
        "quantization_bit": 0,
    },
    # How its code computes the same numbers, and prompts that are trained.
    unread=frozenset(
        """
        apply_query_key_layer_scaling attention_softmax_in_fp32 bias_dropout_fusion
        prefix_projection
        """.split()
    ),
    key_mappings=(
        KeyMapping(
            outside(
                "transformer.embedding.word_embeddings",
                "transformer.encoder.final_layernorm",
                "transformer.output_layer",
            ),
            Layers("transformer.encoder.layers.{layer}.", _layer),
        ),
    ),
)
