"""Nemotron-H and Nemotron 3: layers of Mamba 2, attention, an MLP or experts alone.

Source: transformers `configuration_nemotron_h.py`, `modeling_nemotron_h.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    linear,
    norms,
    outside,
    router,
    ungated_mlp,
)
from bridge.families._deepseek import FURTHER, SIGMOID_ROUTER
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, tokens
from bridge.families._layer_types import FULL
from bridge.families._mamba import mamba
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_AT = "mixer."
_SPLIT = (
    Rule(
        f"{_AT}experts.{{expert}}.up_proj.weight",
        "mlp.experts.up_proj",
        "expert_mlp expert_embed -> expert_embed expert_mlp",
    ),
    Rule(
        f"{_AT}experts.{{expert}}.down_proj.weight",
        "mlp.experts.down_proj",
        "expert_embed expert_mlp -> expert_mlp expert_embed",
    ),
)
_FUSED = (
    Rule(
        f"{_AT}experts.up_proj",
        "mlp.experts.up_proj",
        "experts expert_mlp expert_embed -> experts expert_embed expert_mlp",
    ),
    Rule(
        f"{_AT}experts.down_proj",
        "mlp.experts.down_proj",
        "experts expert_embed expert_mlp -> experts expert_mlp expert_embed",
    ),
)


def _sparse(config: DecoderConfig, experts: Rules) -> Rules:
    """Router, experts, what all tokens share, and projections to latent vectors."""
    at, to = f"{_AT}shared_experts.", "mlp.shared_expert."
    rules = (
        *router(f"{_AT}gate"),
        Rule(
            f"{_AT}gate.e_score_correction_bias",
            "mlp.router.correction_bias",
            "experts -> experts",
        ),
        *experts,
        *linear(f"{at}up_proj", f"{to}up_proj", "shared_mlp embed -> embed shared_mlp"),
        *linear(
            f"{at}down_proj",
            f"{to}down_proj",
            "embed shared_mlp -> shared_mlp embed",
        ),
    )
    if config.moe is None or config.moe.latent_size is None:
        return rules
    return (
        *rules,
        *linear(
            f"{_AT}fc1_latent_proj",
            "mlp.latent_in",
            "expert_embed embed -> embed expert_embed",
        ),
        *linear(
            f"{_AT}fc2_latent_proj",
            "mlp.latent_out",
            "embed expert_embed -> expert_embed embed",
        ),
    )


def _layers(experts: Rules) -> KeyMapping:
    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        if kind.channels == "dense":
            own = ungated_mlp(config, f"{_AT}up_proj", f"{_AT}down_proj")
        elif kind.channels == "sparse":
            own = _sparse(config, experts)
        elif kind.mixer == "mamba":
            own = mamba(config, _AT)
        else:
            own = attention(config, _AT)
        norm = "input_layernorm" if kind.mixer else "pre_feedforward_layernorm"
        return own + norms({"norm": norm})

    outer = outside("backbone.embeddings", "backbone.norm_f")
    return KeyMapping(outer, Layers("backbone.layers.{layer}.", rules))


_LETTERS = {"M": "linear_attention", "E": "moe", "*": FULL, "-": "mlp"}
_OLD = {"mamba": "linear_attention", "attention": FULL}
_TYPES = {"linear_attention": "mamba", FULL: FULL}
_NAMES = {"mamba": "linear_attention", FULL: FULL}
_LAYERS = {
    "layers_block_type": None,
    "hybrid_override_pattern": None,
    "num_hidden_layers": None,
}
_EXPERTS: dict[str, tuple[str, Any]] = {
    "n_routed_experts": ("num_experts", 8),
    "num_experts_per_tok": ("num_experts_per_tok", 2),
    "moe_intermediate_size": ("intermediate_size", 7688),
    "moe_shared_expert_intermediate_size": ("shared_intermediate_size", 7688),
    "moe_latent_size": ("latent_size", None),
    "routed_scaling_factor": ("routed_scaling_factor", 1.0),
    "n_group": ("n_group", 1),
    "topk_group": ("topk_group", 1),
    "norm_topk_prob": ("norm_topk_prob", True),
}


def _read_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    given, pattern = fields["layers_block_type"], fields["hybrid_override_pattern"]
    if given is None:
        given = _LETTERS.values() if pattern is None else map(_letter, pattern)
    kinds = [_OLD.get(kind, kind) for kind in given]
    if unknown := sorted(set(kinds) - set(_LETTERS.values())):
        raise ValueError(f"layers_block_type has {unknown}: known are {_LETTERS}")
    values: dict[str, Any] = {
        "num_hidden_layers": len(kinds),
        "layer_types": tuple(_TYPES.get(kind, "none") for kind in kinds),
        "mixer_only_layers": tuple(i for i, k in enumerate(kinds) if k in _TYPES),
    }
    if "moe" not in kinds:
        return values
    experts = {f"moe.{ours}": fields[name] for name, (ours, _) in _EXPERTS.items()}
    dense = tuple(i for i, kind in enumerate(kinds) if kind == "mlp")
    return {**values, **SIGMOID_ROUTER, **experts, "dense_layers": dense}


def _letter(letter: str) -> str:
    if letter not in _LETTERS:
        raise ValueError(f"hybrid_override_pattern has {letter!r}: known: {_LETTERS}")
    return _LETTERS[letter]


def _write_layers(config: DecoderConfig) -> dict[str, Any]:
    moe, dense = config.moe, "mlp"
    kinds = [
        _NAMES.get(type_, dense if moe is None or i in config.dense_layers else "moe")
        for i, type_ in enumerate(config.layer_types or ())
    ]
    experts = {
        name: getattr(moe, ours) if moe else default
        for name, (ours, default) in _EXPERTS.items()
    }
    return {"layers_block_type": kinds, "num_hidden_layers": len(kinds), **experts}


_DEFAULTS = {**_LAYERS, **{name: default for name, (_, default) in _EXPERTS.items()}}
# A bound that no code reads (the lower one is `time_step_min`), and the kinds of layers
# that predict further tokens, which are left out.
_UNREAD = {
    "time_step_limit": (0.0, float("inf")),
    "mtp_hybrid_override_pattern": None,
    "mtp_layers_block_type": None,
}

FAMILY = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    fields={
        **{name: f for name, f in SIZES.items() if name != "num_hidden_layers"},
        **tokens(1, 2, 0),
        "num_key_value_heads": Field(8),
        "head_dim": Field(128, aliases=("attention_head_dim",)),
        "max_position_embeddings": Field(4096),
        "layer_norm_epsilon": Field(1e-5, "norm_eps"),
        "mlp_hidden_act": Field("relu2", "hidden_act"),
        "mlp_bias": Field(False),
        "mamba_num_heads": Field(128, "mamba.num_heads"),
        "mamba_head_dim": Field(64, "mamba.head_dim"),
        "n_groups": Field(8, "mamba.num_groups"),
        "ssm_state_size": Field(128, "mamba.state_size"),
        "conv_kernel": Field(4, "mamba.kernel_size"),
        "use_conv_bias": Field(True, "mamba.conv_bias"),
        "use_bias": Field(False, "mamba.proj_bias"),
        "chunk_size": Field(128, "mamba.chunk_size"),
        "time_step_min": Field(0.001, "mamba.min_time_step"),
    },
    transforms=(
        FieldTransform(tuple(_DEFAULTS), _read_layers, _write_layers, _DEFAULTS),
        FieldTransform(tuple(_UNREAD), lambda _: {}, lambda _: {}, _UNREAD),
    ),
    constants={
        "norm": "rms_wide",
        "gated_mlp": False,
        "rope": None,
        "learned_positions": False,
    },
    fixed={
        "mamba_hidden_act": "silu",
        "residual_in_fp32": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    # Read by remote code, or by none; no rope, no bias of attention, no further layers.
    passthrough={
        "attention_bias": False,
        "expand": 2,
        "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "moe_shared_expert_overlap": True,
        "n_shared_experts": 1,
        "norm_eps": None,
        "num_logits_to_keep": 1,
        "output_router_logits": False,
        "partial_rotary_factor": None,
        "rescale_prenorm_residual": True,
        "rms_norm_eps": None,
        "rope_theta": None,
        "time_step_floor": 1e-4,
        "time_step_max": 0.1,
        "time_step_rank": None,
        "use_mamba_kernels": True,
        FURTHER: 0,
    },
    left_out={FURTHER: 0},
    aliases={
        "layer_types": "layers_block_type",
        "num_local_experts": "n_routed_experts",
        "mamba_chunk_size": "chunk_size",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_init_floor": "time_step_floor",
        "mamba_dt_max": "time_step_max",
        "mamba_dt_min": "time_step_min",
        "mamba_expand": "expand",
        "mamba_n_groups": "n_groups",
    },
    optional=("moe",),
    key_mappings=(_layers(_SPLIT), _layers(_FUSED)),
    ignore=ignore_tied_head,
)
