"""MiMo-V2-Flash: sliding layers with sinks and twice the key heads of full ones.

Value heads are narrower than key heads, and values are scaled; a rope turns a part of
each head, and experts are chosen as DeepSeek-V3 chooses them. The layers that predict
further tokens are left out, as transformers leaves them out.

Source: transformers `configuration_mimo_v2_flash.py`, `modeling_mimo_v2_flash.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families import _deepseek
from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    of_full_layers,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, attention_bias, moe, tokens
from bridge.families._hf_rope import rope_by_layer_type
from bridge.families._layer_types import DENSE_BY_TYPE, FULL, SLIDING, sliding_or_full
from bridge.families._sparse import key_mappings_by_kind
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

Fields = Mapping[str, Any]


def _attention(sinks: str) -> Callable[[DecoderConfig, LayerKind], Rules]:
    rule = Rule(f"self_attn.{sinks}", "self_attn.sinks", "heads -> heads")

    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        own = attention(config)
        return of_full_layers(own) if kind.is_full else (*own, rule)

    return rules


def _absent(fields: Fields) -> list[str]:
    layers = range(fields["num_hidden_layers"])
    return [SLIDING if i and (i + 1) % 6 else FULL for i in layers]


_TYPES = sliding_or_full(_absent)


def _read_heads(fields: Fields) -> dict[str, Any]:
    heads, scale = fields["num_key_value_heads"], fields["attention_value_scale"]
    return {
        "num_key_value_heads": 2 * heads,
        "full_attention.num_key_value_heads": heads,
        "full_attention.head_dim": fields["head_dim"],
        "full_attention.sinks": False,
        "multipliers.value": 1.0 if scale is None else scale,
    }


def _write_heads(config: DecoderConfig) -> dict[str, Any]:
    assert config.full_attention is not None and config.multipliers is not None
    return {
        "num_key_value_heads": config.full_attention.num_key_value_heads,
        "attention_value_scale": config.multipliers.value,
    }


_HEADS = FieldTransform(
    ("num_key_value_heads", "attention_value_scale"),
    _read_heads,
    _write_heads,
    {"num_key_value_heads": 4, "attention_value_scale": 0.707},
)


def _read_window(fields: Fields) -> dict[str, Any]:
    window, before = fields["sliding_window"], fields["sliding_window_size"]
    return {"sliding_window": window if before is None else 1 + before}


_WINDOW = FieldTransform(
    ("sliding_window", "sliding_window_size"),
    _read_window,
    lambda config: {"sliding_window": config.sliding_window},
    {"sliding_window": 129, "sliding_window_size": None},
)
"""`sliding_window_size` of published files does not count the current token."""


def _read_factor(fields: Fields) -> dict[str, Any]:
    factor = fields["routed_scaling_factor"]
    return {"moe.routed_scaling_factor": 1.0 if factor is None else factor}


def _write_factor(config: DecoderConfig) -> dict[str, Any]:
    assert config.moe is not None
    return {"routed_scaling_factor": config.moe.routed_scaling_factor}


_FACTOR = FieldTransform(
    ("routed_scaling_factor",),
    _read_factor,
    _write_factor,
    {"routed_scaling_factor": 1.0},
)


def _check_published(fields: Fields) -> dict[str, Any]:
    """Refuses what published files say otherwise than the fields that are read."""
    types = _TYPES.read(fields)["layer_types"]
    dense = DENSE_BY_TYPE.read(fields)["dense_layers"]
    expected = {
        "swa_num_attention_heads": fields["num_attention_heads"],
        "swa_num_key_value_heads": 2 * fields["num_key_value_heads"],
        "swa_head_dim": fields["head_dim"],
        "swa_v_head_dim": fields["v_head_dim"],
        "layernorm_epsilon": fields["rms_norm_eps"],
        "hybrid_layer_pattern": [int(kind == SLIDING) for kind in types],
        "moe_layer_freq": [int(i not in dense) for i in range(len(types))],
    }
    wrong = [
        f"{name} = {fields[name]!r}: transformers does not read it, and what it reads "
        f"says {value!r}"
        for name, value in expected.items()
        if fields[name] not in (None, value)
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    return {}


_PUBLISHED = (
    *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"),
    *("swa_v_head_dim", "layernorm_epsilon", "hybrid_layer_pattern", "moe_layer_freq"),
)

FAMILY = Family(
    model_type="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    fields={
        **{name: f for name, f in SIZES.items() if name != "num_key_value_heads"},
        **tokens(1, None),
        **attention_bias(out=False),
        **moe(
            num_experts=("n_routed_experts", 256),
            num_experts_per_tok=("num_experts_per_tok", 8),
            intermediate_size=("moe_intermediate_size", 2048),
            norm_topk_prob=("norm_topk_prob", True),
            n_group=("n_group", 1),
            topk_group=("topk_group", 1),
        ),
        "head_dim": Field(192),
        "v_head_dim": Field(128, "value_head_dim"),
        "max_position_embeddings": Field(131072),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        rope_by_layer_type(
            5000000.0,
            10000.0,
            default={"rope_type": "default", "rope_theta": 5000000.0},
            partial=0.334,
        ),
        _TYPES,
        DENSE_BY_TYPE,
        _HEADS,
        _WINDOW,
        _FACTOR,
        FieldTransform(
            _PUBLISHED,
            _check_published,
            lambda config: {},
            dict.fromkeys(_PUBLISHED),
        ),
    ),
    constants={**_deepseek.SIGMOID_ROUTER, "attention_sinks": True},
    optional=("full_attention", "multipliers"),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"output_router_logits": False},
    # Of published files: what the model has always.
    inert={
        "add_swa_attention_sink_bias": True,
        "attention_chunk_size": 128,
        "scoring_func": "sigmoid",
        "swa_rope_theta": 10000,
        "topk_method": "noaux_tc",
    },
    # Files have a name of their own for the sinks.
    key_mappings=(
        key_mappings_by_kind(
            _attention("attention_sink_bias"), lambda _: (_deepseek.CORRECTION_BIAS,)
        )[0],
        key_mappings_by_kind(
            _attention("sinks"), lambda _: (_deepseek.CORRECTION_BIAS,)
        )[1],
    ),
    ignore=ignore_tied_head,
)
