"""K-EXAONE: attention of EXAONE 4, norms before it, and experts of DeepSeek-V3.

Source: transformers `configuration_exaone_moe.py`, `modeling_exaone_moe.py`, and
`conversion_mapping.py` for the names of the releases.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _deepseek
from bridge.families._blocks import Rules, attention, ignore_tied_head
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense_or_by_type, turned_where_sliding
from bridge.families._sparse import key_mappings
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule


def _corrected(config: DecoderConfig) -> Rules:
    """Rules of the shared experts, and of a correction bias beside the router."""
    name = "mlp.e_score_correction_bias"
    bias = Rule(name, "mlp.router.correction_bias", "experts -> experts")
    return (bias, *_deepseek.shared(config))


_IS_SPARSE = "is_moe_layer"


def _dense_layers() -> FieldTransform:
    """Reads which layers are dense; releases say it twice, and must agree."""
    base = first_dense_or_by_type(1)

    def read(fields: Mapping[str, Any]) -> dict[str, Any]:
        found, listed = base.read(fields), fields[_IS_SPARSE]
        layers = range(fields["num_hidden_layers"])
        sparse = [layer not in found["dense_layers"] for layer in layers]
        if listed is not None and list(listed) != sparse:
            raise ValueError(
                f"{_IS_SPARSE} = {listed!r}: the other fields say {sparse}"
            )
        return found

    said = {**base.defaults, _IS_SPARSE: None}
    return FieldTransform(tuple(said), read, base.write, said)


FAMILY = Family(
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    also_architectures=("ExaoneMoEForCausalLM",),
    fields={
        **SIZES,
        **tokens(1, 53, 0),
        **moe(
            num_experts=("num_experts", 64),
            num_experts_per_tok=("num_experts_per_tok", 8),
            intermediate_size=("moe_intermediate_size", 1024),
            norm_topk_prob=("norm_topk_prob", True),
            routed_scaling_factor=("routed_scaling_factor", 2.5),
            n_group=("n_group", 1),
            topk_group=("topk_group", 1),
        ),
        "num_key_value_heads": Field(32),
        "max_position_embeddings": Field(2048),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        rope(),
        turned_where_sliding(4),
        _dense_layers(),
        _deepseek.shared_experts(1, "num_shared_experts"),
    ),
    constants={**_deepseek.SIGMOID_ROUTER, "qk_norm": "head"},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"output_router_logits": False, _deepseek.FURTHER: None},
    left_out={_deepseek.FURTHER: None},
    # Of published files: what the model has always.
    inert={
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_last_k_dense_replace": 1,
    },
    key_mappings=key_mappings(attention, _corrected),
    ignore=ignore_tied_head,
)
