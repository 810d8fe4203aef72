"""BLOOM and BLOOMZ: ALiBi, normed embeddings, layer norms and biases everywhere.

The rows of q, k and v are one tensor, head by head. Some checkpoints, BigScience's own
among them, lack the prefix `transformer.`.

Source: transformers `configuration_bloom.py`, `modeling_bloom.py`.
"""

from bridge.families import _gpt
from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention_out,
    ignore_tied_head,
    norms,
    outside,
    ungated_mlp,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import tokens
from bridge.families._fused import fused_qkv
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return (
        *fused_qkv(config, "self_attention.query_key_value"),
        *attention_out(config, "self_attention.dense"),
        *ungated_mlp(config, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        *norms(PRE_NORMS, bias=True),
    )


def _key_mapping(prefix: str) -> KeyMapping:
    names = {f"{prefix}word_embeddings_layernorm": "embed_norm"}
    outer = outside(f"{prefix}word_embeddings", f"{prefix}ln_f")
    return KeyMapping(
        lambda config: outer(config) + norms(names, bias=True),
        Layers(prefix + "h.{layer}.", _layer),
    )


# An MLP is four times as wide as the residual stream, whatever the file says.
_WIDTH = FieldTransform(
    ("hidden_size",),
    lambda fields: {
        "hidden_size": fields["hidden_size"],
        "intermediate_size": 4 * fields["hidden_size"],
    },
    lambda config: {"hidden_size": config.hidden_size},
    {"hidden_size": 64},
)

FAMILY = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    fields={
        **tokens(1, 2),
        "vocab_size": Field(250880),
        "n_layer": Field(2, "num_hidden_layers", ("num_hidden_layers",)),
        "n_head": Field(8, "num_attention_heads", ("num_attention_heads",)),
        "layer_norm_epsilon": Field(1e-5, "norm_eps"),
        "initializer_range": Field(0.02),
        "tie_word_embeddings": Field(True),
    },
    transforms=(_WIDTH,),
    constants={
        "rope": None,
        "alibi_bias_max": 8.0,
        "embedding_norm": True,
        "hidden_act": "gelu_pytorch_tanh",
        **_gpt.LAYERS,
    },
    fixed={"apply_residual_connection_post_layernorm": False},
    # The sums of `slow_but_exact` are those of one product.
    passthrough={
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "pretraining_tp": 1,
        "slow_but_exact": False,
    },
    aliases={"n_embed": "hidden_size"},
    key_mappings=(_key_mapping("transformer."), _key_mapping("")),
    ignore=ignore_tied_head,
)
