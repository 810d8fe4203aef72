"""Lara 4 Mini: delta nets, sliding layers and full ones without a rope, and experts.

Source: transformers `configuration_lara_mini.py`, `modeling_lara_mini.py`,
  `conversion_mapping.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families._blocks import Rules, attention, ignore_tied_head, mlp
from bridge.families._delta_net import delta_net_apart, delta_net_fused
from bridge.families._family import Family, Field, KeyMapping
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import (
    EXPERT_TRAINING,
    SIZES,
    attention_bias,
    moe,
    tokens,
)
from bridge.families._hf_rope import rope
from bridge.families._layer_types import FULL, SLIDING, mixer_types
from bridge.families._sparse import key_mappings_by_kind
from bridge.families.qwen3_next import LINEAR, SIZES_OF_DELTA_NET
from bridge.models import DecoderConfig, LayerKind

Fields = Mapping[str, Any]
_PATTERN = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
_TYPES = mixer_types(
    {LINEAR: "delta_net", SLIDING: SLIDING},
    lambda fields: [
        _PATTERN[layer % len(_PATTERN)] for layer in range(fields["num_hidden_layers"])
    ],
)


def _read_types(fields: Fields) -> dict[str, Any]:
    types = _TYPES.read(fields)["layer_types"]
    full = tuple(layer for layer, kind in enumerate(types) if kind == FULL)
    return {"layer_types": types, "no_rope_layers": full}


def _key_mappings(
    delta_net: Callable[[DecoderConfig], Rules],
) -> tuple[KeyMapping, KeyMapping]:
    def mixer(config: DecoderConfig, kind: LayerKind) -> Rules:
        return (delta_net if kind.mixer == "delta_net" else attention)(config)

    return key_mappings_by_kind(mixer, _shared)


def _shared(config: DecoderConfig) -> Rules:
    at = "mlp.shared_expert."
    return mlp(config, at, at, "shared_mlp")


_EXPERT_WIDTH = "moe_intermediate_size"

FAMILY = Family(
    model_type="lara_mini",
    architecture="LaraMiniForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name != "intermediate_size"},
        **SIZES_OF_DELTA_NET,
        **tokens(None, 151643),
        **attention_bias(),
        **moe(
            num_experts=("num_experts", 128),
            num_experts_per_tok=("num_experts_per_tok", 4),
            intermediate_size=(_EXPERT_WIDTH, 512),
            norm_topk_prob=("norm_topk_prob", True),
            shared_intermediate_size=("shared_expert_intermediate_size", 512),
        ),
        "num_key_value_heads": Field(4),
        "linear_num_key_heads": Field(8, "delta_net.num_key_heads"),
        "linear_num_value_heads": Field(16, "delta_net.num_value_heads"),
        "head_dim": Field(128),
        "max_position_embeddings": Field(131072),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "sliding_window": Field(512),
        "tie_word_embeddings": Field(True),
    },
    transforms=(
        rope(),
        FieldTransform(_TYPES.names, _read_types, _TYPES.write, _TYPES.defaults),
        # No layer is dense: the file has no width of an MLP.
        FieldTransform(
            (),
            lambda fields: {"intermediate_size": fields[_EXPERT_WIDTH]},
            lambda config: {},
        ),
    ),
    constants={
        "norm": "rms_wide",
        "qk_norm": "head",
        "moe.float32_logits": True,
        "moe.rounded_weights": True,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough=EXPERT_TRAINING,
    # Published files have the projections of a delta net as one tensor.
    key_mappings=(
        _key_mappings(delta_net_fused)[1],
        _key_mappings(delta_net_apart)[1],
    ),
    ignore=ignore_tied_head,
)
