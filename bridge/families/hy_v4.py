"""Hy 4: independent residual streams, gated latent attention to indexed keys, sinks.

As GLM-5, but attention has a gate and sinks, the last dims of an indexer turn, experts
are clamped, and several residual streams are read and written, and never mixed. Layers
that predict further tokens are left out.

Source: transformers `configuration_hy_v4.py`, `modeling_hy_v4.py`, and the names of
released tensors in `conversion_mapping.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families import _deepseek, deepseek_v32, glm_moe_dsa
from bridge.families._blocks import (
    FUSED_EXPERTS,
    PRE_NORMS,
    Rules,
    ignore_tied_head,
    linear,
    mlp,
    norms,
    outside,
    renamed,
    router,
)
from bridge.families._deepseek_v4_rules import connection
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import DENSE_BY_TYPE
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_TYPES, _EVERY = "indexer_types", 4
_LIMIT, _KEYS = "swiglu_limit", "num_key_value_heads"


def _read_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    types, count = fields[_TYPES], fields["num_hidden_layers"]
    if types is None:
        owns = [layer == 0 or layer % _EVERY == 1 for layer in range(count)]
        types = ["full" if own else "shared" for own in owns]
    return glm_moe_dsa.INDEXER_TYPES.read(
        {**glm_moe_dsa.INDEXER_TYPES.defaults, **fields, _TYPES: types}
    )


def _read_limit(fields: Mapping[str, Any]) -> dict[str, Any]:
    limit = fields[_LIMIT]
    # The config's text says that there is no bound then, and the model clamps by it.
    if limit is None or limit <= 0:
        raise ValueError(f"{_LIMIT} = {limit!r}: a bound above 0 is modelled")
    return {"moe.swiglu_limit": float(limit)}


def _write_limit(config: DecoderConfig) -> dict[str, Any]:
    assert config.moe is not None
    return {_LIMIT: config.moe.swiglu_limit}


_GATE = linear(
    "self_attn.gate_proj",
    "self_attn.q_gate",
    "(heads v_head_dim) embed -> embed heads v_head_dim",
)
_SINKS = Rule("self_attn.sinks", "self_attn.sinks", "heads -> heads")
_CONNECTIONS = (
    *connection("attn_hc.", "mixer_connection", "stream_mixes", "two"),
    *connection("ffn_hc.", "mlp_connection", "stream_mixes", "two"),
)
_LEAVES = ("fn", "base", "scale")
_RELEASED = {
    "self_attn.gate_proj.weight": "self_attn.linear_gate.weight",
    "self_attn.sinks": "self_attn.learnable_sink_param",
    **{
        f"{ours}_hc.{leaf}": f"hc_pre.hc_{theirs}_layer.hc_{leaf}"
        for ours, theirs in (("attn", "attn"), ("ffn", "mlp"))
        for leaf in _LEAVES
    },
}
# transformers writes the name of the gate of attention for those of MLPs as well.
_WRITTEN = _RELEASED | {
    f"mlp.{module}gate_proj.weight": f"mlp.{module}linear_gate.weight"
    for module in ("", "shared_experts.")
}
_RELEASED_OUTSIDE = {
    f"model.hc_head.hc_{leaf}": f"model.hc_pre.hc_head.hc_head_{leaf}"
    for leaf in _LEAVES
}


def _layer(
    names: Mapping[str, str],
) -> Callable[[DecoderConfig, LayerKind], Rules]:
    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        own = (*deepseek_v32.attend(config, kind), *_GATE, _SINKS, *_CONNECTIONS)
        if kind.channels == "sparse":
            beside = _deepseek.corrected_and_shared(config)
            own += (*router(), *FUSED_EXPERTS, *beside)
        else:
            own += mlp(config)
        return renamed(own + norms(PRE_NORMS), names)

    return rules


def _key_mapping(outer: Mapping[str, str], inner: Mapping[str, str]) -> KeyMapping:
    """Returns one of the ways to name the tensors.

    Args:
      outer: Names of tensors outside of layers, by those of transformers in memory.
      inner: Names of a layer's tensors, likewise.
    """

    def rules(config: DecoderConfig) -> Rules:
        own = outside()(config)
        own += connection("model.hc_head.hc_", "streams", "streams_out", "one")
        return renamed(own, outer)

    return KeyMapping(rules, Layers("model.layers.{layer}.", _layer(inner)))


FAMILY = Family(
    model_type="hy_v4",
    architecture="HYV4ForCausalLM",
    fields={
        **{name: field for name, field in _deepseek.FIELDS.items() if name != _KEYS},
        **deepseek_v32.INDEXER,
        **tokens(120000, 120025, 120002),
        **moe(
            num_experts=("n_routed_experts", 256),
            num_experts_per_tok=("num_experts_per_tok", 8),
            intermediate_size=("moe_intermediate_size", 768),
            norm_topk_prob=("norm_topk_prob", True),
            routed_scaling_factor=("routed_scaling_factor", 2.827),
            n_group=("n_group", 1),
            topk_group=("topk_group", 1),
        ),
        "max_position_embeddings": Field(262144),
        "initializer_range": Field(0.006),
        "rms_norm_eps": Field(1e-5, ("norm_eps", "indexer.norm_eps")),
        "qk_nope_head_dim": Field(192, "mla.qk_nope_head_dim"),
        "v_head_dim": Field(256, "mla.v_head_dim"),
        "index_n_heads": Field(16, "indexer.num_heads"),
        "hc_mult": Field(4, "hyper_connections.num_streams"),
        "hc_magnitude": Field(2.0, "hyper_connections.expand_factor"),
        "hc_eps": Field(1e-6, "hyper_connections.eps"),
    },
    transforms=(
        rope(),
        DENSE_BY_TYPE,
        _deepseek.shared_experts(1),
        deepseek_v32.TYPES,
        FieldTransform(
            (_TYPES,), _read_types, glm_moe_dsa.INDEXER_TYPES.write, {_TYPES: None}
        ),
        # Each head has keys of its own, whatever a file says: transformers sets it so.
        FieldTransform(
            (_KEYS,),
            lambda fields: {_KEYS: fields["num_attention_heads"]},
            lambda config: {_KEYS: config.num_key_value_heads},
            {_KEYS: 32},
        ),
        FieldTransform((_LIMIT,), _read_limit, _write_limit, {_LIMIT: 10.0}),
    ),
    constants={
        **_deepseek.SIGMOID_ROUTER,
        "attention_gate": True,
        "attention_sinks": True,
        "indexer.rotates_last": True,
        "hyper_connections.independent": True,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    # What sinks begin with.
    passthrough={"output_router_logits": False, "learnable_sink_init": 0.0},
    key_mappings=(
        _key_mapping(_RELEASED_OUTSIDE, _RELEASED),
        _key_mapping(_RELEASED_OUTSIDE, _WRITTEN),
        _key_mapping({}, {}),
    ),
    module_names=2,
    ignore=ignore_tied_head,
)
