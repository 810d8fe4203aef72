"""InternLM 3: Llama by another name, with other names of its biases.

Source: transformers `configuration_internlm3.py`, which computes with
`modeling_llama.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope


def _check_biases(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["attention_bias"] != fields["mlp_bias"]:
        raise ValueError(
            f"attention_bias = {fields['attention_bias']}, mlp_bias = "
            f"{fields['mlp_bias']}: transformers has both or neither"
        )
    return {}


FAMILY = Family(
    model_type="internlm3",
    architecture="InternLM3ForCausalLM",
    also_architectures=("LlamaForCausalLM",),
    fields={
        **SIZES,
        **tokens(1, 2, 2),
        "attention_bias": Field(
            False, ("attention_bias", "attention_out_bias"), ("qkv_bias",)
        ),
        "mlp_bias": Field(False, aliases=("bias",)),
        "num_key_value_heads": Field(2),
        "head_dim": Field(128),
        "max_position_embeddings": Field(32768),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(rope(), FieldTransform((), _check_biases, lambda config: {})),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
