"""StarCoder2: layer norms, biases everywhere, and an MLP without a gate.

Source: transformers `configuration_starcoder2.py`, `modeling_starcoder2.py`.
"""

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    norms,
    ungated_mlp,
)
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import window_of_all
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    inner = ungated_mlp(config, "mlp.c_fc", "mlp.c_proj")
    return attention(config) + inner + norms(PRE_NORMS, bias=True)


FAMILY = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    fields={
        **SIZES,
        **tokens(50256, 50256),
        "num_key_value_heads": Field(2),
        "max_position_embeddings": Field(4096),
        "initializer_range": Field(0.018042),
        "tie_word_embeddings": Field(True),
        "norm_epsilon": Field(1e-5, "norm_eps"),
        "hidden_act": Field("gelu_pytorch_tanh"),
        "use_bias": Field(True, ("attention_bias", "attention_out_bias", "mlp_bias")),
    },
    transforms=(rope(), window_of_all()),
    constants={"norm": "layer", "norm_bias": True, "gated_mlp": False},
    passthrough={
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
    },
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
