"""Transforms of `TransformerConfig` fields for experts, routers and latent attention.

Megatron's router matches that of transformers only for some values. The weights of the
chosen experts sum to 1 if softmax follows the choice (`pre_softmax` false), or, with
sigmoid scores, if more than one expert is chosen. A group of experts is scored by its
best `topk / group_topk` experts; DeepSeek-V2 uses the best one, V3 the best two.

Source: Megatron-LM megatron/core/transformer/moe/moe_utils.py
::topk_routing_with_score_function, ::group_limited_topk
"""

from typing import Any

from bridge.families._field_transform import FieldTransform
from bridge.megatron.config._refusal import Fields, refuse
from bridge.models import DecoderConfig, MoEConfig

_LATENT_NORM_EPS = 1e-6
_LATENT = {
    "q_lora_rank": "mla.q_lora_rank",
    "kv_lora_rank": "mla.kv_lora_rank",
    "qk_head_dim": "mla.qk_nope_head_dim",
    "qk_pos_emb_head_dim": "mla.qk_rope_head_dim",
    "v_head_dim": "mla.v_head_dim",
}
_GROUP_SCORING = {1: "max", 2: "top2_sum"}
"""Group scoring by the number of experts whose scores are added per group."""


def _read_latent(fields: Fields) -> dict[str, Any]:
    if not fields["multi_latent_attention"]:
        return {}
    refuse(
        []
        if fields["qk_layernorm"]
        else ["qk_layernorm = False: latent vectors are normed"]
    )
    return {ours: fields[theirs] for theirs, ours in _LATENT.items()}


def _write_latent(config: DecoderConfig) -> dict[str, Any]:
    mla = config.mla
    if mla is None:
        return {"multi_latent_attention": False}
    if config.norm_eps != _LATENT_NORM_EPS:
        raise ValueError(
            f"norm_eps = {config.norm_eps}: transformers norms latent vectors with "
            f"{_LATENT_NORM_EPS}, Megatron with that of the other norms"
        )
    if mla.scale_latents:
        raise ValueError("mla.scale_latents = True: it scales no latent vectors")
    if mla.gated_queries:
        raise ValueError("mla.gated_queries = True: its queries have no gates")
    sizes = {
        theirs: getattr(mla, ours.removeprefix("mla."))
        for theirs, ours in _LATENT.items()
    }
    return {"multi_latent_attention": True, "qk_layernorm": True, **sizes}


def _read_experts(fields: Fields) -> dict[str, Any]:
    if fields["num_moe_experts"] is None:
        return {}
    values = {
        "moe.num_experts": fields["num_moe_experts"],
        "moe.num_experts_per_tok": fields["moe_router_topk"],
        "moe.intermediate_size": (
            fields["moe_ffn_hidden_size"] or fields["ffn_hidden_size"]
        ),
        "moe.shared_intermediate_size": fields["moe_shared_expert_intermediate_size"],
        "moe.shared_gate": fields["moe_shared_expert_gate"],
        "dense_layers": read_dense_layers(fields),
    }
    return values | _read_router(fields)


def read_dense_layers(fields: Fields) -> tuple[int, ...]:
    """Returns the indices of the dense layers of a sparse model.

    Raises:
      ValueError: If the length of the `moe_layer_freq` list is not the layer count, or
        the number is 0.
    """
    pattern, layers = fields["moe_layer_freq"], range(fields["num_layers"])
    if pattern == 0:
        raise ValueError("moe_layer_freq = 0: give every how many layers one is sparse")
    if isinstance(pattern, int):
        return tuple(i for i in layers if i % pattern)
    if len(pattern) != len(layers):
        raise ValueError(f"moe_layer_freq has {len(pattern)} entries for {len(layers)}")
    return tuple(i for i in layers if not pattern[i])


def _read_router(fields: Fields) -> dict[str, Any]:
    function, chosen = fields["moe_router_score_function"], fields["moe_router_topk"]
    groups, of_groups = fields["moe_router_num_groups"], fields["moe_router_group_topk"]
    softmax, before = function == "softmax", fields["moe_router_pre_softmax"]
    wrong = []
    if function not in ("softmax", "sigmoid"):
        wrong.append(f"moe_router_score_function = {function!r} is not modelled")
    if fields["moe_router_load_balancing_type"] == "sinkhorn":
        wrong.append("moe_router_load_balancing_type = 'sinkhorn': another router")
    biased = fields["moe_router_enable_expert_bias"]
    if softmax and biased:
        wrong.append("moe_router_enable_expert_bias: only of sigmoids")
    if softmax and groups and not before and chosen // (of_groups or 1) > 1:
        wrong.append("moe_router_num_groups: groups judged by sums of logits")
    values: dict[str, Any] = {
        "moe.scoring": function,
        # Megatron divides sigmoid scores by their sum only if several are chosen.
        "moe.norm_topk_prob": not before if softmax else chosen > 1,
        "moe.routed_scaling_factor": fields["moe_router_topk_scaling_factor"] or 1.0,
        "moe.correction_bias": biased,
        "moe.n_group": groups,
        "moe.topk_group": of_groups,
    }
    if groups and of_groups:
        if chosen // of_groups not in _GROUP_SCORING:
            wrong.append(
                f"moe_router_group_topk = {of_groups} for {chosen} experts: a group "
                "judged by more than its best two is not modelled"
            )
        values["moe.group_scoring"] = _GROUP_SCORING.get(chosen // of_groups)
    refuse(wrong)
    return values


def _write_experts(config: DecoderConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {"num_moe_experts": None}
    sparse = [
        int(i not in config.dense_layers) for i in range(config.num_hidden_layers)
    ]
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.num_experts_per_tok,
        "moe_ffn_hidden_size": moe.intermediate_size,
        "moe_layer_freq": 1 if all(sparse) else sparse,
        "moe_shared_expert_intermediate_size": moe.shared_intermediate_size,
        "moe_shared_expert_gate": moe.shared_gate,
        **_write_router(moe),
    }


def _write_router(moe: MoEConfig) -> dict[str, Any]:
    refuse(_wrong_weights(moe) + _wrong_groups(moe))
    sigmoid = moe.scoring == "sigmoid"
    scaling = moe.routed_scaling_factor
    return {
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_pre_softmax": not sigmoid and not _sums_to_one(moe),
        "moe_router_topk_scaling_factor": None if scaling == 1 else scaling,
        "moe_router_enable_expert_bias": moe.correction_bias,
        "moe_router_num_groups": moe.n_group,
        "moe_router_group_topk": moe.topk_group,
        "moe_router_dtype": "fp32" if moe.float32_logits else None,
    }


def _sums_to_one(moe: MoEConfig) -> bool:
    return moe.norm_topk_prob or moe.scoring == "softmax_of_chosen"


def _wrong_weights(moe: MoEConfig) -> list[str]:
    wrong, several = [], moe.num_experts_per_tok > 1
    if _sums_to_one(moe) and not several:
        wrong.append("moe.norm_topk_prob = True of one expert: its weight is its score")
    if moe.scoring == "sigmoid" and several and not moe.norm_topk_prob:
        wrong.append("moe.norm_topk_prob = False of sigmoids: it always divides")
    if moe.scoring != "sigmoid" and moe.correction_bias:
        wrong.append("moe.correction_bias = True: it has one of sigmoids alone")
    if moe.corrected_logits:
        wrong.append("moe.corrected_logits = True: it corrects scores")
    if moe.own_norms or moe.expert_scale:
        wrong.append("moe.own_norms, moe.expert_scale: its router has neither")
    if moe.num_zero_experts:
        wrong.append(
            f"moe.num_zero_experts = {moe.num_zero_experts}: it has an MLP for each"
        )
    if moe.output_bias:
        wrong.append("moe.output_bias = True: it adds nothing to the sum of experts")
    if moe.shared_average:
        wrong.append("moe.shared_average = True: it adds the shared expert")
    if moe.norm_topk_prob and moe.norm_topk_eps != 1e-20:
        wrong.append(f"moe.norm_topk_eps = {moe.norm_topk_eps}: it adds 1e-20")
    if moe.weighted_inputs:
        wrong.append("moe.weighted_inputs = True: it weighs what experts return")
    if moe.scoring == "sqrtsoftplus":
        wrong.append("moe.scoring = 'sqrtsoftplus': its scores are not modelled")
    if moe.scoring == "sparsemixer":
        wrong.append("moe.scoring = 'sparsemixer': its routers do not mix so")
    return wrong


def _wrong_groups(moe: MoEConfig) -> list[str]:
    if moe.topk_group is None:
        return []
    summed, wrong = moe.num_experts_per_tok // moe.topk_group, []
    if _GROUP_SCORING.get(summed) != moe.group_scoring:
        wrong.append(
            f"moe.group_scoring = {moe.group_scoring!r}: it judges a group by its best "
            f"{moe.num_experts_per_tok} / {moe.topk_group} = {summed} experts"
        )
    if summed > 1 and moe.scoring != "sigmoid" and _sums_to_one(moe):
        wrong.append("moe.n_group: it would judge groups by sums of logits")
    return wrong


MLA_CODEC = FieldTransform(
    ("multi_latent_attention", *_LATENT), _read_latent, _write_latent
)
MOE_CODEC = FieldTransform(
    (
        *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"),
        *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
        *("moe_layer_freq", "moe_router_score_function", "moe_router_pre_softmax"),
        *("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
        *("moe_router_num_groups", "moe_router_group_topk", "moe_router_dtype"),
        "moe_router_load_balancing_type",
    ),
    _read_experts,
    _write_experts,
)
