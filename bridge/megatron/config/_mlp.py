"""Transforms of `TransformerConfig` fields for the MLP's activation and gate.

Source: Megatron-LM megatron/core/transformer/transformer_config.py::TransformerConfig,
megatron/core/transformer/mlp.py::MLP, megatron/core/fusions/fused_bias_gelu.py
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._field_transform import FieldTransform
from bridge.megatron.config._refusal import Fields, refuse
from bridge.models import DecoderConfig

SILU, GELU, TANH_GELU, QUICK_GELU = "silu", "gelu", "fast_gelu", "quick_gelu"
QUICK_ALPHA = 1.702
"""Factor on the argument of the sigmoid in `quick_gelu`."""


def _read_mlp(fields: Fields) -> dict[str, Any]:
    name = activation_name(fields["activation_func"])
    clamp, offset = fields["activation_func_clamp_value"], fields["glu_linear_offset"]
    gated = fields["gated_linear_unit"]
    if name == QUICK_GELU:
        if not (gated and clamp and offset == 1 and fields["num_moe_experts"]):
            raise ValueError(
                "activation_func = quick_gelu: only in gated experts, with a clamp "
                "and a glu_linear_offset of 1"
            )
        swiglu = {"moe.swiglu_limit": clamp, "moe.swiglu_alpha": QUICK_ALPHA}
        return {"hidden_act": "silu", "gated_mlp": True, **swiglu}
    # Megatron's fused GELU kernel computes the tanh approximation.
    tanh = name == TANH_GELU or (name == GELU and fields["bias_activation_fusion"])
    ours = {SILU: "silu", GELU: "gelu", TANH_GELU: "gelu_new"}
    wrong = [] if name in ours else [f"activation_func = {name!r}: none of {[*ours]}"]
    wrong += [
        f"{key} = {fields[key]!r}: only with quick_gelu"
        for key in ("activation_func_clamp_value", "glu_linear_offset")
        if fields[key]
    ]
    refuse(wrong)
    return {"hidden_act": "gelu_new" if tanh else ours[name], "gated_mlp": gated}


def activation_name(activation: Any) -> str:
    """Returns the name of an activation, given in any form that configs use.

    Args:
      activation: Name, function, or a YAML file's mapping with the path of a function
        under `_target_`.
    """
    if isinstance(activation, Mapping):
        activation = activation.get("_target_")
    name = getattr(activation, "__name__", activation)
    return str(name).rpartition(".")[2]


def _write_mlp(config: DecoderConfig) -> dict[str, Any]:
    written = {
        "gated_linear_unit": config.gated_mlp,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "bias_activation_fusion": False,
    }
    moe = config.moe
    if moe is not None and moe.swiglu_limit is not None:
        alone = not config.dense_layers and moe.shared_intermediate_size is None
        if moe.swiglu_alpha != QUICK_ALPHA or not alone:
            raise ValueError(
                f"moe.swiglu_alpha = {moe.swiglu_alpha}: it has "
                f"{QUICK_ALPHA} in all MLPs of a model, or in none"
            )
        return written | {
            "activation_func": QUICK_GELU,
            "activation_func_clamp_value": moe.swiglu_limit,
            "glu_linear_offset": 1.0,
        }
    names = {"silu": SILU, "gelu": GELU}
    names |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), TANH_GELU)
    if config.hidden_act not in names:
        raise ValueError(f"hidden_act = {config.hidden_act!r}: none of {[*names]}")
    return written | {"activation_func": names[config.hidden_act]}


MLP_CODEC = FieldTransform(
    (
        *("gated_linear_unit", "activation_func", "activation_func_clamp_value"),
        *("glu_linear_offset", "bias_activation_fusion"),
    ),
    _read_mlp,
    _write_mlp,
)
