"""Config files of Hugging Face, mutated: what a family's file may say, and may not."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiny_configs import (
    DEEPSEEK_ROPE,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    LONGROPE,
    VARIANTS,
    YARN_ROPE,
    hf_fields,
)

from bridge.families import FAMILIES

Choose = Callable[[Sequence[Any]], Any]
"""Picks one of several: a seeded `random.Random.choice`, or hypothesis's draw."""

FULL, SLIDING = "full_attention", "sliding_attention"
HEADS = ("as_saved", "as_saved", "as_saved", "as_saved", "as_saved", "same", "other")


@dataclasses.dataclass(frozen=True)
class ConfigCase:
    """A config file, and what lies beside it.

    Args:
      fields: What `config.json` says.
      head: `other` stores an output projection that is not the embedding, `same` one
        that is, `as_saved` what transformers writes.
    """

    fields: Mapping[str, Any]
    head: str = "as_saved"

    def to_json(self) -> str:
        """Returns the case as one line, for `config_fuzz.py --case`."""
        return json.dumps({"fields": self.fields, "head": self.head})

    @staticmethod
    def from_json(text: str) -> ConfigCase:
        """Reads what `to_json` wrote."""
        return ConfigCase(**json.loads(text))


def case_of_seed(seed: int, model_types: Sequence[str] = ()) -> ConfigCase:
    """Draws a case by number; as many in a row as there are fields change each once.

    Args:
      seed: The number.
      model_types: Families to draw from; all by default.
    """
    names = (
        name
        for name, fields in VARIANTS.items()
        if not model_types or fields["model_type"] in model_types
    )
    pairs = field_pairs(tuple(names))
    random.Random(0).shuffle(pairs)
    pair = pairs[seed % len(pairs)]
    return draw_case(random.Random(seed).choice, pairs=[pair])


def draw_case(
    choose: Choose,
    variants: Sequence[str] = tuple(VARIANTS),
    pairs: Sequence[tuple[str, str]] = (),
) -> ConfigCase:
    """Draws a variant of `tiny_configs`, a change of one field, and up to two more.

    Args:
      choose: Picks one of several.
      variants: Which may be drawn.
      pairs: Family and field of the first change; by default any of the variants'.
    """
    model_type, name = choose(pairs or field_pairs(variants))
    own = [v for v in variants if VARIANTS[v]["model_type"] == model_type]
    fields = copy.deepcopy(hf_fields(choose(own)))
    _touch(fields, name, choose)
    for _ in range(choose((0, 0, 1, 2))):
        choose(_MUTATIONS)(fields, choose)
    return ConfigCase(fields, choose(("same", "other") if name == _HEAD else HEADS))


def field_pairs(variants: Sequence[str]) -> list[tuple[str, str]]:
    """Returns each family with each field that its logits may depend on."""
    families = dict.fromkeys(VARIANTS[variant]["model_type"] for variant in variants)
    return [
        (model_type, name)
        for model_type in families
        for name in sorted(_read_by(model_type) - _INERT)
    ]


def _read_by(model_type: str) -> set[str]:
    family = FAMILIES[model_type]
    read = {*family.fields, *family.fixed, *family.passthrough}
    read |= {name for one in family.transforms for name in one.names}
    return (read & {*_VALUES, "rope_parameters"}) | {_HEAD}


_HEAD = "lm_head"
_INERT = frozenset(
    """
    attention_dropout aux_loss_alpha bos_token_id cache_implementation ep_size
    initial_context_length n_ctx output_router_logits pad_token_id pretraining_tp
    reorder_and_upcast_attn router_aux_loss_coef router_jitter_noise seq_aux
    summary_type num_nextn_predict_layers
    """.split()
)
# Sizes without which a model is of the default's size: gigabytes.
_KEPT = frozenset(
    """
    model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads n_embd n_layer n_head max_position_embeddings n_positions
    n_routed_experts num_experts num_local_experts moe_intermediate_size n_inner
    shared_expert_intermediate_size ffn_dim ffn_hidden_size moe_num_experts
    """.split()
)
_BOOLS = (True, False, None)
_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
# A file's field, and values that some family's files have, or that are on the border of
# what they may have.
_VALUES: dict[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": _BOOLS,
    "attention_bias": _BOOLS,
    "attention_dropout": (0.0, 0.1, None),
    "attention_in_multiplier": (1.0, 0.5),
    "attention_multiplier": (0.3, 1.0, 0.0),
    "attention_out_multiplier": (1.0, 0.5),
    "attn_config": (
        None,
        {"clip_qkv": 0.8},
        {"softmax_scale": 0.3},
        {"alibi_bias_max": 4},
        {"alibi": False},
        {"qk_ln": True},
        {"attn_type": "multiquery_attention"},
    ),
    "attn_layer_offset": (0, 1, 3, 9),
    "attn_layer_period": (2, 3, 9, 0),
    "attn_logit_softcapping": (1.5, 0.7, 50.0, None),
    "attn_scale": (0.1, 1.0, 0.0),
    "attn_temperature_tuning": (True, False, None),
    "attention_chunk_size": (8, 0, None),
    "aux_loss_alpha": (0.001, None),
    "bos_token_id": (None, 3),
    "cache_implementation": ("hybrid", None),
    "clip_qkv": (1.2, None),
    "decoder_sparse_step": (1, 2, 3, 0),
    "embedding_multiplier": (1.0, 3.0),
    "dim_model_base": (24, 48, None),
    "ep_size": (1,),
    "expand": (2, 4),
    "expansion_ratio": (4, 2),
    "expert_layer_offset": (0, 1, 2),
    "expert_layer_period": (1, 2, 3),
    "final_logit_softcapping": (2.0, 30.0, None),
    "first_k_dense_replace": (0, 1, 2, 3, 9, None),
    "floor_scale": (1, 4, 8192),
    "full_attn_mod": (1,),
    "head_dim": (8, 12, 16, 20, None),
    "hidden_act": ("silu", "gelu", "relu", "gelu_pytorch_tanh", None),
    "hidden_activation": ("gelu_pytorch_tanh", "gelu", None),
    "activation_function": ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"),
    "initial_context_length": (4096,),
    "interleave_moe_layer_step": (1, 3, 9, 0),
    "interpolate_factor": (1,),
    "is_causal": (True, False, None),
    "is_decoder": (True, False),
    "is_llama_config": (True,),
    "key_multiplier": (1.0, 0.3),
    "layer_norm_eps": (1e-5, 0.1),
    "layer_norm_epsilon": (1e-5, 0.1),
    "layer_types": (
        None,
        [],
        [SLIDING, FULL, SLIDING],
        [FULL, FULL, FULL],
        [SLIDING, SLIDING, SLIDING],
        [SLIDING, FULL, SLIDING, FULL],
        [FULL, SLIDING],
        ["linear_attention", FULL, FULL],
    ),
    "learned_pos_emb": (True, False),
    "lm_head_bias": (False, True),
    "lm_head_multiplier": (1.0, 0.3),
    "logit_scale": (0.0625, 2.0, None),
    "logits_scaling": (1.0, 3.0),
    "mamba_conv_bias": (True, False),
    "mamba_d_conv": (2, 5),
    "mamba_d_ssm": (56, 96, None),
    "mamba_dt_rank": (7, "auto"),
    "mamba_expand": (1, 2, 3),
    "mamba_norm_before_gate": (True, False),
    "mamba_proj_bias": (True, False),
    "mamba_rms_norm": (True, False),
    "max_position_embeddings": (64, 256, 32),
    "max_window_layers": (0, 1, 2, 28, None),
    "mlp_bias": _BOOLS,
    "mlp_multipliers": ([0.5, 1.5], [0.5], None),
    "mlp_only_layers": ([], [0], [1, 2], [99], [-1], None),
    "moe_layers": ([], [0, 3], [1], None),
    "moe_layer_freq": (1, 2),
    "n_ctx": (256, 1024),
    "n_group": (None, 1, 2, 4),
    "n_groups": (1, 2, 4),
    "n_shared_experts": (1, 2, 0, None),
    "no_bias": (True, False),
    "no_rope_layer_interval": (4, 2, 0, 1),
    "no_rope_layers": ([], [1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1], None),
    "norm_topk_prob": _BOOLS,
    "num_experts_per_tok": (1, 2, 4, None),
    "num_key_value_heads": (1, 2, 4, None),
    "num_logits_to_keep": (1, 0),
    "num_mtp_layers": (0, 1),
    "num_nextn_predict_layers": (0, 1),
    "original_max_position_embeddings": (32, 64, 4096),
    "output_router_logits": (True, False),
    "pad_token_id": (None, 5),
    "partial_rotary_factor": (0.25, 0.5, 1.0, None),
    "pretraining_tp": (1, 2, 4),
    "projectors_bias": (True, False),
    "q_lora_rank": (None, 12),
    "qkv_bias": _BOOLS,
    "query_pre_attn_scalar": (8, 64, 144),
    "reorder_and_upcast_attn": (True, False),
    "residual_in_fp32": (True, False),
    "residual_multiplier": (1.0, 0.5),
    "rms_norm_eps": (1e-6, 1e-5, 0.1, None),
    "rope_interleave": _BOOLS,
    "rope_interleaved": (False, True),
    "rope_local_base_freq": (1e4, 200.0, None),
    "rope_theta": (1e4, 5e5, 100.0, None),
    "routed_scaling_factor": (1.0, 2.5),
    "router_aux_loss_coef": (0.001, 0.0),
    "router_jitter_noise": (0.0, 0.1),
    "scale_attn_by_inverse_layer_idx": (True, False),
    "scale_attn_weights": (True, False, None),
    "scale_depth": (1.4, 0.3, None),
    "scale_emb": (12, 1, 0.5),
    "scoring_func": ("softmax", "sigmoid", None),
    "seq_aux": (True,),
    "sliding_window": (None, 5, 9, 4096, 0),
    "sliding_window_pattern": (2, 3, 6, 1, 0, None),
    "slow_but_exact": (True, False),
    "ssm_in_multiplier": (1.0, 0.5),
    "ssm_multipliers": ([0.5, 0.6, 0.7, 0.8, 0.9], [0.5], None),
    "ssm_out_multiplier": (1.0, 0.5),
    "summary_type": ("cls_index", "last"),
    "swiglu_alpha": (1.0, 1.702),
    "swiglu_limit": (1.0, 7.0),
    "tie_word_embeddings": (True, True, False, None),
    "time_step_limit": ([0.0, 0.5], [0.3, 0.5]),
    "time_step_rank": (7, "auto"),
    "topk_group": (None, 1, 2, 4),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc", None),
    "use_bias": (True, False),
    "use_bidirectional_attention": (False, None, True),
    "use_conv_bias": (True, False),
    "use_mla": (True,),
    "use_qk_norm": _BOOLS,
    "use_sliding_window": (True, True, False),
    "v_head_dim": (10, 14),
}
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 10000.0},
    LINEAR_ROPE,
    LLAMA3_ROPE,
    YARN_ROPE,
    DEEPSEEK_ROPE,
    LONGROPE,
    {**LONGROPE, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
)
_OF_ROPES: dict[str, tuple[Any, ...]] = {
    "rope_theta": (None, 100.0, 1e6),
    "factor": (None, 1.0, 2.0, 40.0),
    "original_max_position_embeddings": (None, 16, 64),
    "beta_fast": (None, 0, 8, 32),
    "beta_slow": (None, 0, 1, 2),
    "mscale": (None, 0, 1.0, 0.5),
    "mscale_all_dim": (None, 0, 1.0, 0.5),
    "truncate": (None, True, False),
    "attention_factor": (None, 1.0, 0.5),
    "partial_rotary_factor": (None, 0.5, 1.0),
    "low_freq_factor": (1.0, 2.0),
    "high_freq_factor": (4.0, 8.0),
}


def _drop(fields: dict[str, Any], choose: Choose) -> None:
    names = sorted(set(fields) - _KEPT)
    fields.pop(choose(names) if names else None, None)


def _set_own(fields: dict[str, Any], choose: Choose) -> None:
    name = choose(sorted(_read_by(fields["model_type"]) & set(_VALUES)))
    fields[name] = choose(_VALUES[name])


def _set_any(fields: dict[str, Any], choose: Choose) -> None:
    """Any family may be given any field: most files have some that nobody reads."""
    name = choose(tuple(_VALUES))
    fields[name] = choose(_VALUES[name])


def _touch(fields: dict[str, Any], name: str, choose: Choose) -> None:
    """Changes one field, or leaves it out where it is said."""
    if name == "rope_parameters":
        _rope(fields, choose)
    elif name in fields and name not in _KEPT and choose((True, False)):
        del fields[name]
    elif name != _HEAD:
        fields[name] = choose(_VALUES[name])
    if name in _WINDOWS and "use_sliding_window" in _read_by(fields["model_type"]):
        fields["use_sliding_window"] = choose((True, True, False))


def _windows(fields: dict[str, Any], choose: Choose) -> None:
    """Windows are said in several fields, which act together only."""
    for name in _WINDOWS:
        if choose((True, False)):
            fields[name] = choose(_VALUES[name])


def _rope(fields: dict[str, Any], choose: Choose) -> None:
    rope = dict(choose(_ROPES))
    for _ in range(choose((0, 0, 1, 2))):
        name = choose(tuple(_OF_ROPES))
        if choose((True, False)):
            rope[name] = choose(_OF_ROPES[name])
        else:
            rope.pop(name, None)
    rope_format = choose(("rope_parameters", "rope_scaling", "nested", "type"))
    if rope_format == "nested":
        fields["rope_parameters"] = {
            FULL: rope,
            SLIDING: dict(choose(_ROPES)),
        }
        return
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        fields.pop(name, None)
    if rope_format != "rope_parameters" and "rope_theta" in rope:
        fields["rope_theta"] = rope.pop("rope_theta")
    if rope_format == "type":
        rope["type"] = rope.pop("rope_type", "default")
    name = "rope_parameters" if rope_format == "rope_parameters" else "rope_scaling"
    fields[name] = rope


_MUTATIONS = (
    *(_drop, _drop, _drop, _set_own, _set_own, _set_own, _set_own),
    *(_set_any, _rope, _rope, _windows),
)
