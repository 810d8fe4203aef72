"""Qwen 1, of 1.8B to 72B: Qwen2 with q, k and v in one tensor.

Its code takes longer texts than it was trained on by another rope and scaled queries;
they are not modelled, and the maximum length is the one up to which both do nothing.

Source: Qwen/Qwen-14B-Chat `configuration_qwen.py`, `modeling_qwen.py`.
"""

import dataclasses
from typing import Any

from bridge.families import qwen2
from bridge.families._blocks import Rules, linear, norms, outside
from bridge.families._family import Field, KeyMapping, Layers
from bridge.families._fused import qkv_in_turn
from bridge.families._hf_rope import rope
from bridge.families.releases._read import Fields, reads, without
from bridge.models import DecoderConfig, LayerKind

_NORMS = {"ln_1": "input_layernorm", "ln_2": "pre_feedforward_layernorm"}


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    wide = "mlp embed -> embed mlp"
    return (
        *qkv_in_turn(config, "attn.c_attn"),
        *linear(
            "attn.c_proj",
            "self_attn.o_proj",
            "embed (heads v_head_dim) -> heads v_head_dim embed",
        ),
        # The code applies the activation to the second.
        *linear("mlp.w2", "mlp.gate_proj", wide),
        *linear("mlp.w1", "mlp.up_proj", wide),
        *linear("mlp.c_proj", "mlp.down_proj", "embed mlp -> mlp embed"),
        *norms(_NORMS),
    )


def _read_sizes(fields: Fields) -> dict[str, Any]:
    width, longer = fields["intermediate_size"], fields["max_position_embeddings"]
    if width % 2:
        raise ValueError(f"intermediate_size = {width}: of gate and up together, even")
    if fields["use_dynamic_ntk"] or fields["use_logn_attn"]:
        longer = min(longer, fields["seq_length"])
    return {"intermediate_size": width // 2, "max_position_embeddings": longer}


FAMILY = dataclasses.replace(
    qwen2.FAMILY,
    model_type="qwen",
    architecture="QWenLMHeadModel",
    also_architectures=(),
    also_named=(),
    written_as=qwen2.FAMILY.model_type,
    fields={
        **without(qwen2.FAMILY.fields, "intermediate_size", "max_position_embeddings"),
        "head_dim": Field(128, aliases=("kv_channels",)),
        "num_key_value_heads": Field(None),
        "rms_norm_eps": Field(1e-6, "norm_eps", ("layer_norm_epsilon",)),
    },
    transforms=(
        rope(),
        reads(
            _read_sizes,
            {
                "intermediate_size": 22016,
                "max_position_embeddings": 8192,
                "use_dynamic_ntk": True,
                "use_logn_attn": True,
                "seq_length": 8192,
            },
        ),
    ),
    fixed={
        "no_bias": True,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "attn_dropout_prob": 0.0,
        "emb_dropout_prob": 0.0,
    },
    aliases={"rotary_emb_base": "rope_theta"},
    unread=frozenset(
        """
        bf16 fp16 fp32 onnx_safe softmax_in_fp32 use_cache_kernel
        use_cache_quantization use_flash_attn
        """.split()
    ),
    key_mappings=(
        KeyMapping(
            outside("transformer.wte", "transformer.ln_f"),
            Layers("transformer.h.{layer}.", _layer),
        ),
    ),
)
