"""ERNIE 4.5 with experts (21B-A3B, 300B-A47B): a bias corrects a softmax.

Source: transformers `configuration_ernie4_5_moe.py`, `modeling_ernie4_5_moe.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _deepseek, _ernie
from bridge.families._blocks import Rules, attention, ignore_tied_head
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import EXPERT_TRAINING, moe
from bridge.families._sparse import key_mappings
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule

_START, _END, _STEP = (
    f"moe_layer_{name}" for name in ("start_index", "end_index", "interval")
)
_SHARED = "moe_num_shared_experts"


def _beside(config: DecoderConfig) -> Rules:
    bias = Rule(
        "mlp.moe_statics.e_score_correction_bias",
        "mlp.router.correction_bias",
        "one experts -> (one experts)",
    )
    assert config.moe is not None
    has_shared = config.moe.shared_intermediate_size is not None
    return (bias, *(_deepseek.shared(config) if has_shared else ()))


def _read_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(fields["num_hidden_layers"])
    last = layers.stop - 1 if fields[_END] == -1 else fields[_END]
    sparse = [
        layer
        for layer in layers
        if (layer + 1) % fields[_STEP] == 0 and fields[_START] <= layer <= last
    ]
    return {"dense_layers": tuple(i for i in layers if i not in sparse)}


def _write_layers(config: DecoderConfig) -> dict[str, Any]:
    count = config.num_hidden_layers
    sparse = [i for i in range(count) if i not in config.dense_layers]
    first, last = (sparse[0], sparse[-1]) if sparse else (count, count)
    step = sparse[1] - first if len(sparse) > 1 else 1
    return {_START: first, _END: last, _STEP: step}


def _read_shared(fields: Mapping[str, Any]) -> dict[str, Any]:
    width = fields[_SHARED] * fields["moe_intermediate_size"]
    return {"moe.shared_intermediate_size": width or None}


def _write_shared(config: DecoderConfig) -> dict[str, Any]:
    assert config.moe is not None
    width = config.moe.shared_intermediate_size or 0
    return {_SHARED: width // config.moe.intermediate_size}


_LAYERS = {_START: 1, _END: -1, _STEP: 1}

FAMILY = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    fields={
        **_ernie.FIELDS,
        **moe(
            num_experts=("moe_num_experts", 64),
            num_experts_per_tok=("moe_k", 6),
            intermediate_size=("moe_intermediate_size", 1536),
        ),
        "num_key_value_heads": Field(4),
    },
    transforms=(
        _ernie.ROPE,
        FieldTransform(tuple(_LAYERS), _read_layers, _write_layers, _LAYERS),
        FieldTransform((_SHARED,), _read_shared, _write_shared, {_SHARED: 2}),
    ),
    constants={
        "moe.norm_topk_prob": True,
        "moe.correction_bias": True,
        "moe.float32_logits": True,
        "moe.rounded_weights": True,
    },
    # The least sum that the weights are divided by: a softmax does not come near it.
    fixed={**_ernie.FIXED, "use_bias": False, "moe_norm_min": 1e-12},
    passthrough=EXPERT_TRAINING,
    key_mappings=key_mappings(attention, _beside),
    ignore=ignore_tied_head,
)
