"""BitNet b1.58: Llama with norms inside attention and MLPs, of squared ReLU.

The weights are plain ones: what rounds them and the activations in each product, the
published `quantization_config`, is refused.

Source: transformers `configuration_bitnet.py`, `modeling_bitnet.py`.
"""

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    mlp,
    norm,
    norms,
)
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return (
        *attention(config),
        Rule(
            "self_attn.attn_sub_norm.weight",
            "self_attn.inner_norm.scale",
            "(heads v_head_dim) -> heads v_head_dim",
        ),
        *mlp(config),
        norm("mlp.ffn_sub_norm", "mlp.inner_norm", "mlp"),
        *norms(PRE_NORMS),
    )


FAMILY = Family(
    model_type="bitnet",
    architecture="BitNetForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name != "head_dim"},
        **tokens(128000, 128001),
        **attention_bias(),
        "num_key_value_heads": Field(5),
        "max_position_embeddings": Field(2048),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "hidden_act": Field("relu2"),
    },
    transforms=(rope(500000.0),),
    constants={"inner_norms": True},
    fixed={"attention_dropout": 0.0},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
