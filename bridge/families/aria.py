"""Aria's language model: experts beside shared ones, of Llama's layers.

Experts are one tensor a layer, [in, out], gate beside up. Those of the published files
have other names than transformers' in memory.

Source: transformers `configuration_aria.py`, `modeling_aria.py`,
  `conversion_mapping.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families import _deepseek
from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, attention_bias, moe, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_AT = "mlp.experts."


def _layer(gate_up: str, down: str) -> Callable[[DecoderConfig, LayerKind], Rules]:
    experts = (
        Rule(
            _AT + gate_up,
            _AT + "gate_up_proj",
            "experts embed (two expert_mlp) -> experts embed two expert_mlp",
        ),
        Rule(
            _AT + down,
            _AT + "down_proj",
            "experts expert_mlp embed -> experts expert_mlp embed",
        ),
    )

    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        del kind
        inner = router("mlp.router") + experts + _deepseek.shared(config)
        return attention(config) + inner + norms(PRE_NORMS)

    return rules


_SHARED = "moe_num_shared_experts"


def _read_shared(fields: Mapping[str, Any]) -> dict[str, Any]:
    count = fields[_SHARED]
    if count < 1:
        raise ValueError(f"{_SHARED} = {count}: at least 1 is modelled")
    return {"moe.shared_intermediate_size": count * fields["intermediate_size"]}


def _write_shared(config: DecoderConfig) -> dict[str, Any]:
    assert config.moe is not None
    width = config.moe.shared_intermediate_size or 0
    return {_SHARED: width // config.moe.intermediate_size}


FAMILY = Family(
    model_type="aria_text",
    architecture="AriaTextForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2, 2),
        **attention_bias(),
        **moe(
            num_experts=("moe_num_experts", 8),
            num_experts_per_tok=("moe_topk", 2),
        ),
        # All layers are sparse, so this is the width of an expert.
        "intermediate_size": Field(
            4096, ("intermediate_size", "moe.intermediate_size")
        ),
        "max_position_embeddings": Field(2048),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(
        rope(),
        FieldTransform((_SHARED,), _read_shared, _write_shared, {_SHARED: 2}),
    ),
    constants={"moe.scoring": "softmax_of_chosen"},
    # The activation is that of the shared experts alone, the others' is this one.
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "mlp_bias": False},
    key_mappings=(
        key_mapping(_layer("fc1.weight", "fc2.weight")),
        key_mapping(_layer("gate_up_proj", "down_proj")),
    ),
    ignore=ignore_tied_head,
)
