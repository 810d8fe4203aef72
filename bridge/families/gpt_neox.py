"""GPT-NeoX and Pythia: attention and MLP side by side, each behind a norm of its own.

The rows of q, k and v are one tensor, head by head.

Source: transformers `configuration_gpt_neox.py`, `modeling_gpt_neox.py`.
"""

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention_out,
    norms,
    outside,
    ungated_mlp,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._fused import fused_qkv
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return (
        *fused_qkv(config, "attention.query_key_value"),
        *attention_out(config, "attention.dense"),
        *ungated_mlp(config, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        *norms(PRE_NORMS, bias=True),
    )


_STALE = tuple(
    f"gpt_neox.layers.{{layer}}.attention.{name}"
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
)
_HEAD = "embed_out"


def _ignore(config: DecoderConfig) -> tuple[str, ...]:
    return _STALE + ((f"{_HEAD}.weight",) if config.tie_word_embeddings else ())


_SIDE_BY_SIDE = "use_parallel_residual"
_PLACEMENT = FieldTransform(
    (_SIDE_BY_SIDE,),
    lambda fields: {
        "norm_placement": "parallel_two" if fields[_SIDE_BY_SIDE] else "pre"
    },
    lambda config: {_SIDE_BY_SIDE: config.norm_placement == "parallel_two"},
    {_SIDE_BY_SIDE: True},
)
_NOT_OF_NEOX = ("num_key_value_heads", "head_dim")

FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name not in _NOT_OF_NEOX},
        **tokens(0, 2),
        **attention_bias(True),
        "max_position_embeddings": Field(2048),
        "hidden_act": Field("gelu"),
        "layer_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        rope(partial=0.25, names=("rotary_emb_base", "rotary_pct")),
        _PLACEMENT,
    ),
    constants={
        "norm": "layer",
        "norm_bias": True,
        "gated_mlp": False,
        "mlp_bias": True,
    },
    passthrough={"attention_dropout": 0.0, "hidden_dropout": 0.0},
    key_mappings=(
        KeyMapping(
            outside("gpt_neox.embed_in", "gpt_neox.final_layer_norm", _HEAD),
            Layers("gpt_neox.layers.{layer}.", _layer),
        ),
    ),
    ignore=_ignore,
)
