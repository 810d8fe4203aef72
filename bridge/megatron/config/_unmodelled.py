"""Detection of Megatron settings that change the model and are not supported.

A run has some 850 settings. A setting that changes what the model computes is either
read by a transform or listed in `FIXED` with its only supported value. Any other
setting is rejected if it is set and its name begins like a part of the model, so that a
multiplier added by a new version is not silently dropped.
"""

import re
from collections.abc import Mapping
from typing import Any

FIXED: Mapping[str, Any] = {
    "add_position_embedding": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "enable_hyper_connections": False,
    "enable_mhc_connections": False,
    "experimental_attention_variant": None,
    "head_wise_attn_gate": False,
    "heterogeneous_block_specs": False,
    "heterogeneous_layers_config_encoded_json": None,
    "heterogeneous_layers_config_path": None,
    "hybrid_attention_ratio": 0.0,
    "hybrid_layer_pattern": None,
    "hybrid_mlp_ratio": 0.0,
    "hybrid_override_pattern": None,
    "is_hybrid_model": False,
    "linear_attention_freq": None,
    "linear_attention_type": None,
    "moe_apply_probs_on_input": False,
    "moe_expert_capacity_factor": None,
    "moe_expert_rank_capacity_factor": None,
    "moe_latent_size": None,
    "moe_mlp_glu_interleave_size": None,
    "moe_n_hash_layers": 0,
    "moe_router_force_biased": None,
    "moe_router_force_load_balancing": False,
    "moe_router_topk_limited_devices": None,
    "moe_shared_expert_glu_interleave_size": None,
    "moe_token_dropping": False,
    "mrope_section": None,
    "mup_embedding_mult": 1.0,
    "mup_output_mult": 1.0,
    "qk_l2_norm": False,
    "rotary_base_per_layer": None,
    "spec": None,
    "use_legacy_models": False,
    "use_mup": False,
}
"""Fields that change what the model computes, each with its only supported value."""

_NEUTRAL = re.compile(
    r"""
    # how it is run, or trained, though it begins like a part of the model
    activation_func_fp8_input_store
    | attention_backend | attention_softmax_in_fp32
    | embedding_init_method\w* | embedding_path
    | logits_(load|save)_\w+ | logit_dtype
    | mla_down_proj_fusion
    | moe_z_loss_coeff
    | moe_(deepep|hybridep|flex|ncclep|paged_stash|routing_trace|upcycling|use)_?\w*
    | moe_(enable_deepep|enable_routing_replay|extended_tp|grouped_gemm)
    | moe_(combine_bwd|dispatch_fwd)_dtype
    | moe_(layer_recompute|per_layer_logging|permute_fusion\w*|pad_expert\w+)
    | moe_router_(bias_update_rate|fusion|padding_for_\w+|quantile_balancing_ema)
    | moe_(shared_expert_overlap|single_grouped_\w+)
    | moe_(token_dispatcher_type|token_drop_policy)
    | mtp_(loss_scaling_factor|standalone|detach_heads|use_repeated_layer|hsm)
    | mtp_hybrid_override_pattern
    | qk_clip\w*
    """,
    re.VERBOSE,
)
_PART = re.compile(
    r"""
    (activation_func | attention | attn | embedding | final_logit | glu | layernorm
    | logit | mla | moe | mtp | norm | post_ | qk | residual | rope | rotary | sliding
    | softcap | softmax | window | yarn)
    """,
    re.VERBOSE,
)


def find_unmodelled(fields: Mapping[str, Any], read: frozenset[str]) -> list[str]:
    """Returns one line per field that is set and not supported.

    Args:
      fields: Fields of a `TransformerConfig` or settings of a run, by name.
      read: Names that the transforms and `read_training` read.
    """
    wrong = [
        f"{name} = {fields[name]!r}: only {modelled!r} is modelled"
        for name, modelled in FIXED.items()
        if fields.get(name) not in (None, modelled)
    ]
    return wrong + [
        f"{name} = {value!r}: this field is not modelled"
        for name, value in fields.items()
        if name not in read and name not in FIXED and _PART.match(name)
        if not _NEUTRAL.fullmatch(name) and value not in (None, False, 0, [], {}, "")
    ]
