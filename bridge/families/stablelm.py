"""StableLM 2 and 3B-4E1T: layer norms, a quarter of each head rotary.

The 12B model norms each head by a scale of its own, and adds attention and MLP side by
side.

Source: transformers `configuration_stablelm.py`, `modeling_stablelm.py`.
"""

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    mlp,
    norms,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, qk_norm_switch, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    parallel = config.norm_placement == "parallel"
    names = {k: v for k, v in PRE_NORMS.items() if k == v or not parallel}
    parts = attention(config, norms=None), _head_norms(config), mlp(config)
    return sum(parts, ()) + norms(names, bias=True)


def _head_norms(config: DecoderConfig) -> Rules:
    if config.qk_norm is None:
        return ()
    return tuple(
        Rule(
            f"self_attn.{name}_layernorm.norms.{{{head}}}.weight",
            f"self_attn.{name}_norm.scale",
            "head_dim -> head_dim",
        )
        for name, head in (("q", "head"), ("k", "kv_head"))
    )


_SIDE_BY_SIDE = "use_parallel_residual"
_PLACEMENT = FieldTransform(
    (_SIDE_BY_SIDE,),
    lambda fields: {"norm_placement": "parallel" if fields[_SIDE_BY_SIDE] else "pre"},
    lambda config: {_SIDE_BY_SIDE: config.norm_placement == "parallel"},
    {_SIDE_BY_SIDE: False},
)

FAMILY = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name != "head_dim"},
        **tokens(0, 0),
        "num_key_value_heads": Field(32),
        "max_position_embeddings": Field(4096),
        "layer_norm_eps": Field(1e-5, "norm_eps"),
        "use_qkv_bias": Field(False, "attention_bias"),
    },
    transforms=(
        rope(partial=0.25),
        qk_norm_switch("qk_layernorm", "per_head"),
        _PLACEMENT,
    ),
    constants={"norm": "layer", "norm_bias": True},
    fixed={"hidden_act": "silu"},
    passthrough={"attention_dropout": 0.0, "hidden_dropout": 0.0},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
