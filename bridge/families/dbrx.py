"""DBRX: fine-grained experts, layer norms without biases, bounded q, k and v.

Its files say attention and experts each in an object of their own, and the base of the
rope in the former, which transformers 5 does not read there: an export says it in
`rope_parameters` as well.

Source: transformers `configuration_dbrx.py`, `modeling_dbrx.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    Rules,
    attention_out,
    norms,
    outside,
    router,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import tokens
from bridge.families._fused import qkv_in_turn
from bridge.families._hf_rope import rope
from bridge.families._transformers_fields import COMMON
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

Fields = Mapping[str, Any]

_AT = "norm_attn_norm."
_EXPERTS = "ffn.experts.mlp."


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return (
        *qkv_in_turn(config, f"{_AT}attn.Wqkv"),
        *attention_out(config, f"{_AT}attn.out_proj"),
        *router("ffn.router.layer"),
        Rule(
            (f"{_EXPERTS}w1", f"{_EXPERTS}v1"),
            "mlp.experts.gate_up_proj",
            "(experts one expert_mlp) embed -> experts embed one expert_mlp",
            dim=2,
        ),
        Rule(
            f"{_EXPERTS}w2",
            "mlp.experts.down_proj",
            "(experts expert_mlp) embed -> experts expert_mlp embed",
        ),
        *norms(
            {
                f"{_AT}norm_1": "input_layernorm",
                f"{_AT}norm_2": "pre_feedforward_layernorm",
            }
        ),
    )


def _part(
    fields: Fields, name: str, defaults: Fields, inert: tuple[str, ...]
) -> dict[str, Any]:
    """Returns the values of an object of the file, with the defaults filled in."""
    given = fields[name] or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} = {given!r} is not an object")
    known = {*defaults, *inert, *COMMON}
    wrong = [
        f"{name}.{key} = {value!r}: this field is not modelled"
        for key, value in given.items()
        if key not in known and value not in (None, False)
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    return {key: given.get(key, default) for key, default in defaults.items()}


_ATTENTION, _EXPERT = "attn_config", "ffn_config"
# Defaults of what is read of each; the base has one in `rope_parameters`.
_OF_ATTENTION = {"clip_qkv": None, "kv_n_heads": 1, "rope_theta": None}
_OF_EXPERTS = {
    "ffn_act_fn": None,
    "ffn_hidden_size": 3584,
    "moe_num_experts": 4,
    "moe_top_k": 1,
    "moe_normalize_expert_weights": 1.0,
    "hidden_size": None,
}
_BASE = 10000.0
# What transformers 5 derives, and writes beside it.
_HEADS = "num_key_value_heads"
_ROPE = rope(_BASE)


def _read_attention(fields: Fields) -> dict[str, Any]:
    read = _part(fields, _ATTENTION, _OF_ATTENTION, ("attn_pdrop",))
    theta, said = read["rope_theta"], any(fields[name] for name in _ROPE.names)
    beside = fields if said or theta is None else {**fields, "rope_theta": theta}
    values = _ROPE.read(beside)
    found, heads = values["rope"].rope_theta, fields[_HEADS]
    if heads not in (None, read["kv_n_heads"]):
        raise ValueError(
            f"{_HEADS} = {heads!r}: {_ATTENTION}.kv_n_heads is {read['kv_n_heads']!r}"
        )
    if theta is not None and found != theta:
        raise ValueError(
            f"{_ATTENTION}.rope_theta = {theta!r}, and the rope beside it has a base "
            f"of {found!r}: transformers 5 reads the latter alone, and fills in "
            f"{_BASE!r} where it is missing. Say the base of the weights in both."
        )
    return {
        **values,
        "num_key_value_heads": read["kv_n_heads"],
        "clip_qkv": read["clip_qkv"],
    }


def _write_attention(config: DecoderConfig) -> dict[str, Any]:
    assert config.rope is not None
    read = {
        "clip_qkv": config.clip_qkv,
        "kv_n_heads": config.num_key_value_heads,
        "rope_theta": config.rope.rope_theta,
    }
    return {**_ROPE.write(config), _ATTENTION: read}


def _read_experts(fields: Fields) -> dict[str, Any]:
    inert = ("moe_jitter_eps", "moe_loss_weight")
    read = _part(fields, _EXPERT, _OF_EXPERTS, inert)
    act, power = read["ffn_act_fn"], read["moe_normalize_expert_weights"]
    wrong = []
    if act not in (None, {"name": "silu"}):
        wrong.append(f"{_EXPERT}.ffn_act_fn = {act!r}: only silu is modelled")
    if power not in (None, 1):
        wrong.append(
            f"{_EXPERT}.moe_normalize_expert_weights = {power!r}: weights are divided "
            "by their sum (1), or not (null)"
        )
    if read["hidden_size"] not in (None, fields["d_model"]):
        wrong.append(
            f"{_EXPERT}.hidden_size = {read['hidden_size']!r}: d_model is "
            f"{fields['d_model']!r}"
        )
    if wrong:
        raise ValueError("\n".join(wrong))
    return {
        "intermediate_size": read["ffn_hidden_size"],
        "moe.intermediate_size": read["ffn_hidden_size"],
        "moe.num_experts": read["moe_num_experts"],
        "moe.num_experts_per_tok": read["moe_top_k"],
        "moe.norm_topk_prob": power is not None,
    }


def _write_experts(config: DecoderConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    return {
        _EXPERT: {
            "ffn_hidden_size": moe.intermediate_size,
            "moe_num_experts": moe.num_experts,
            "moe_top_k": moe.num_experts_per_tok,
            "moe_normalize_expert_weights": 1.0 if moe.norm_topk_prob else None,
        }
    }


FAMILY = Family(
    model_type="dbrx",
    architecture="DbrxForCausalLM",
    also_architectures=("DBRXForCausalLM",),
    fields={
        **tokens(None, None),
        "vocab_size": Field(32000),
        "d_model": Field(2048, "hidden_size", ("hidden_size",)),
        "n_layers": Field(24, "num_hidden_layers", ("num_hidden_layers",)),
        "n_heads": Field(16, "num_attention_heads", ("num_attention_heads",)),
        "max_seq_len": Field(2048, "max_position_embeddings"),
        "initializer_range": Field(0.02),
    },
    transforms=(
        FieldTransform(
            (*_ROPE.names, _ATTENTION, _HEADS),
            _read_attention,
            _write_attention,
            {**_ROPE.defaults, _ATTENTION: None, _HEADS: None},
        ),
        FieldTransform((_EXPERT,), _read_experts, _write_experts, {_EXPERT: None}),
    ),
    # transformers gives layer norms torch's epsilon.
    constants={"norm": "layer", "norm_eps": 1e-5, "moe.rounded_weights": True},
    optional=("moe", "rope"),
    fixed={"tie_word_embeddings": False},
    passthrough={
        "emb_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "output_router_logits": False,
        "router_aux_loss_coef": None,
    },
    key_mappings=(
        KeyMapping(
            outside("transformer.wte", "transformer.norm_f"),
            Layers("transformer.blocks.{layer}.", _layer),
        ),
    ),
)
