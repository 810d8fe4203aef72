"""Qwen3-MoE: Qwen3 with experts.

Source: transformers `configuration_qwen3_moe.py`, `modeling_qwen3_moe.py`.
"""

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    mlp,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._fields import (
    EXPERT_TRAINING,
    SIZES,
    attention_bias,
    moe,
    tokens,
)
from bridge.families._hf_rope import rope
from bridge.families._layer_types import DENSE_BY_STEP, switched_window
from bridge.families._sparse import key_mappings
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

# Qwen3-VL stores its experts the other way round, as [expert, embed, gate and up].
_TRANSPOSED_EXPERTS = (
    Rule(
        "mlp.experts.gate_up_proj",
        "mlp.experts.gate_up_proj",
        "experts embed (two expert_mlp) -> experts embed two expert_mlp",
    ),
    Rule(
        "mlp.experts.down_proj",
        "mlp.experts.down_proj",
        "experts expert_mlp embed -> experts expert_mlp embed",
    ),
)


def _layer_of_images(config: DecoderConfig, kind: LayerKind) -> Rules:
    sparse = kind.channels == "sparse"
    inner = router() + _TRANSPOSED_EXPERTS if sparse else mlp(config)
    return attention(config) + inner + norms(PRE_NORMS)


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    # Text parts of Qwen3-VL and Qwen3-Omni.
    also_named=("qwen3_vl_moe_text", "qwen3_omni_moe_text"),
    fields={
        **SIZES,
        **tokens(None, None),
        **attention_bias(),
        **moe(
            num_experts=("num_experts", 128),
            num_experts_per_tok=("num_experts_per_tok", 8),
            intermediate_size=("moe_intermediate_size", 768),
            norm_topk_prob=("norm_topk_prob", False),
        ),
        "num_key_value_heads": Field(4),
        "max_position_embeddings": Field(32768),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(rope(), DENSE_BY_STEP, switched_window(None)),
    constants={"qk_norm": "head", "moe.rounded_weights": True},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={**EXPERT_TRAINING, "max_window_layers": None},
    key_mappings=(*key_mappings(), key_mapping(_layer_of_images)),
    ignore=ignore_tied_head,
)
