"""EXAONE 3 and 3.5: Llama whose tensors have names like GPT-2's.

Source: transformers `configuration_exaone.py`, `modeling_exaone.py`, and
`conversion_mapping.py` for the names of the releases.
"""

from bridge.families._blocks import (
    Rules,
    attention,
    dense_layer,
    ignore_tied_head,
    key_mapping,
    linear,
    norms,
    outside,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    inside, back = ("mlp -> mlp", "embed -> embed") if config.mlp_bias else (None, None)
    wide = "mlp embed -> embed mlp"
    return (
        *attention(config, "attn.attention.", out="out_proj"),
        *linear("mlp.c_fc_0", "mlp.gate_proj", wide, inside),
        *linear("mlp.c_fc_1", "mlp.up_proj", wide, inside),
        *linear("mlp.c_proj", "mlp.down_proj", "embed mlp -> mlp embed", back),
        *norms({"ln_1": "input_layernorm", "ln_2": "pre_feedforward_layernorm"}),
    )


_RELEASES = KeyMapping(
    outside("transformer.wte", "transformer.ln_f"),
    Layers("transformer.h.{layer}.", _layer),
)

FAMILY = Family(
    model_type="exaone",
    architecture="ExaoneForCausalLM",
    also_architectures=("LlamaForCausalLM",),  # what transformers makes of it
    fields={
        **SIZES,
        **tokens(1, 361, 0),
        **attention_bias(),
        "num_hidden_layers": Field(aliases=("num_layers",)),
        "num_key_value_heads": Field(8),
        "max_position_embeddings": Field(4096),
        "rms_norm_eps": Field(1e-5, "norm_eps", ("layer_norm_epsilon",)),
        "hidden_act": Field("silu", aliases=("activation_function",)),
        "mlp_bias": Field(False),
    },
    transforms=(rope(500000.0),),
    fixed={"attention_dropout": 0.0},
    # Dropout of the releases' own code, which transformers does not read.
    inert={"embed_dropout": 0.0},
    key_mappings=(_RELEASES, key_mapping(dense_layer)),
    ignore=ignore_tied_head,
)
