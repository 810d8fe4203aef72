"""DeepSeek-V3, R1, and others of the architecture (Kimi K2, Moonlight).

The layers that predict further tokens, behind the last, are left out, as transformers
leaves them out: an import warns of those that it finds, and an export announces none.
Weights in FP8 are decoded by the source.

Source: transformers `configuration_deepseek_v3.py`, `modeling_deepseek_v3.py`.
"""

from bridge.families import _deepseek
from bridge.families._blocks import latent_attention
from bridge.families._family import Family, Field
from bridge.families._fields import moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense
from bridge.families._sparse import key_mappings

FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    also_named=("kimi_k2",),
    fields={
        **_deepseek.FIELDS,
        **tokens(0, 1),
        "num_key_value_heads": Field(128),
        **moe(
            num_experts=("n_routed_experts", 256),
            num_experts_per_tok=("num_experts_per_tok", 8),
            intermediate_size=("moe_intermediate_size", 2048),
            norm_topk_prob=("norm_topk_prob", True),
            routed_scaling_factor=("routed_scaling_factor", 2.5),
            n_group=("n_group", 8),
            topk_group=("topk_group", 4),
        ),
        "max_position_embeddings": Field(4096),
    },
    transforms=(
        rope(interleaved=True, interleave_field="rope_interleave"),
        first_dense(3),
        _deepseek.shared_experts(1),
        _deepseek.DERIVED_SIZES,
    ),
    constants=_deepseek.SIGMOID_ROUTER,
    fixed={**_deepseek.FIXED, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    passthrough={**_deepseek.PASSTHROUGH, _deepseek.FURTHER: 1},
    aliases={"num_mtp_layers": _deepseek.FURTHER},
    left_out={_deepseek.FURTHER: 0},
    key_mappings=key_mappings(latent_attention, _deepseek.corrected_and_shared),
    ignore=_deepseek.ignore_further,
)
