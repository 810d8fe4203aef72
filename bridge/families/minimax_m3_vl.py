"""MiniMax M3: M2's router beside a shared MLP, clamped gates, attention to blocks.

Published files hold each expert and each half of a gated MLP by itself, and the indexer
beside the projections of attention; transformers writes them joined.

Source: transformers `configuration_minimax_m3_vl.py`, `modeling_minimax_m3_vl.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _deepseek
from bridge.families._blocks import (
    FUSED_EXPERTS,
    PRE_NORMS,
    Rules,
    attention,
    experts,
    fused_gate_up,
    ignore_tied_head,
    key_mapping,
    linear,
    mlp,
    norm,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import EXPERT_TRAINING, SIZES, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import FULL, SPARSE_BY_TYPE, mixer_types
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_AT = "block_sparse_moe."


def _indexer(at: str) -> Rules:
    """Rules of the indexer, by what its names begin with."""
    to = "self_attn.indexer."
    return (
        *linear(
            at + "q_proj",
            to + "q_proj",
            "(index_heads index_dim) embed -> embed index_heads index_dim",
        ),
        *linear(at + "k_proj", to + "k_proj", "index_dim embed -> embed index_dim"),
        norm(at + "q_norm", to + "q_norm", "index_dim"),
        norm(at + "k_norm", to + "k_norm", "index_dim"),
    )


_SHARED_JOINED = (
    Rule(
        "mlp.shared_experts.gate_up_proj.weight",
        ("mlp.shared_expert.gate_proj.kernel", "mlp.shared_expert.up_proj.kernel"),
        ("shared_mlp embed -> embed shared_mlp",) * 2,
    ),
    *linear(
        "mlp.shared_experts.down_proj",
        "mlp.shared_expert.down_proj",
        "embed shared_mlp -> shared_mlp embed",
    ),
)


def _joined(config: DecoderConfig, kind: LayerKind) -> Rules:
    """A layer as transformers writes it."""
    inner = fused_gate_up(config)
    if kind.channels == "sparse":
        correction = _deepseek.CORRECTION_BIAS
        inner = (*router(), correction, *FUSED_EXPERTS, *_SHARED_JOINED)
    indexer = _indexer("self_attn.indexer.") if kind.indexes else ()
    return attention(config) + indexer + inner + norms(PRE_NORMS)


def _apart(config: DecoderConfig, kind: LayerKind) -> Rules:
    """A layer of published files."""
    inner = mlp(config)
    if kind.channels == "sparse":
        inner = (
            *router(_AT + "gate"),
            *experts(_AT + "experts.{expert}.", gate="w1", up="w3", down="w2"),
            Rule(
                _AT + "e_score_correction_bias",
                "mlp.router.correction_bias",
                "experts -> experts",
            ),
            *mlp(config, _AT + "shared_experts.", "mlp.shared_expert.", "shared_mlp"),
        )
    indexer = _indexer("self_attn.index_") if kind.indexes else ()
    return attention(config) + indexer + inner + norms(PRE_NORMS)


_SPARSE, _PUBLISHED = "minimax_m3_sparse", "sparse_attention_config"
_INDEXER = {
    # Field: ours, default, name in `sparse_attention_config`.
    "index_n_heads": ("num_heads", 4, "sparse_num_index_heads"),
    "index_head_dim": ("head_dim", 128, "sparse_index_dim"),
    "index_block_size": ("block_size", 128, "sparse_block_size"),
    "index_topk_blocks": ("num_blocks", 16, "sparse_topk_blocks"),
    "index_local_blocks": ("num_local_blocks", 1, "sparse_local_block"),
}
_OF_ALL = {
    "use_sparse_attention": True,
    "sparse_score_type": "max",
    "sparse_init_block": 0,
}
"""What else published files say of it: the one value that is modelled."""
_FREQUENCY, _NO_VALUES = "sparse_attention_freq", "sparse_disable_index_value"
_KNOWN = {*_OF_ALL, _FREQUENCY, _NO_VALUES, *(name for _, _, name in _INDEXER.values())}

_TYPES = mixer_types(
    {_SPARSE: "block_sparse_attention"},
    lambda fields: _types_of_flags(
        f"{_PUBLISHED}.{_FREQUENCY}",
        _published(fields).get(_FREQUENCY),
        fields,
        (_SPARSE, FULL),
    ),
)


def _types_of_flags(
    name: str, flags: Any, fields: Mapping[str, Any], types: tuple[str, str]
) -> list[str]:
    """Returns a type for each layer, the first for those with a 1 in a list."""
    count, (one, zero) = fields["num_hidden_layers"], types
    if flags is None:
        return [zero] * count
    if not isinstance(flags, list) or len(flags) != count or set(flags) - {0, 1}:
        raise ValueError(
            f"{name} = {flags!r}: a list of 0 or 1 for each of the {count} layers"
        )
    return [one if flag else zero for flag in flags]


def _published(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what published files say of the indexer in a field of their own."""
    given = fields[_PUBLISHED] or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{_PUBLISHED} = {given!r} is not an object")
    return given


def _read_attention(fields: Mapping[str, Any]) -> dict[str, Any]:
    published = _published(fields)
    wrong = [
        f"{_PUBLISHED}.{name} = {published[name]!r}: only {value!r} is modelled"
        for name, value in _OF_ALL.items()
        if published.get(name, value) != value
    ]
    wrong += [
        f"{_PUBLISHED}.{name} is not known" for name in sorted({*published} - _KNOWN)
    ]
    types = _TYPES.read(fields)["layer_types"]
    without = published.get(_NO_VALUES)
    if isinstance(without, list):
        wrong += [
            f"{_PUBLISHED}.{_NO_VALUES}: layer {layer} has values of its index, which "
            "are not modelled"
            for layer, (kind, off) in enumerate(zip(types, without, strict=False))
            if kind != FULL and not off
        ]
    if wrong:
        raise ValueError("\n".join(wrong))
    sizes = {
        f"block_indexer.{ours}": published.get(name, fields[field])
        for field, (ours, _, name) in _INDEXER.items()
    }
    return {"layer_types": types, **sizes}


def _write_attention(config: DecoderConfig) -> dict[str, Any]:
    sizes = config.block_indexer
    assert sizes is not None
    written = {field: getattr(sizes, ours) for field, (ours, *_) in _INDEXER.items()}
    return _TYPES.write(config) | written


_ATTENTION_DEFAULTS = {
    "layer_types": None,
    _PUBLISHED: None,
    **{field: default for field, (_, default, _) in _INDEXER.items()},
}
_EVERY = "moe_layer_freq"


def _read_dense(fields: Mapping[str, Any]) -> dict[str, Any]:
    types, flags = fields["mlp_layer_types"], fields[_EVERY]
    if types is None and flags is not None:
        types = _types_of_flags(_EVERY, flags, fields, ("sparse", "dense"))
    return SPARSE_BY_TYPE.read({**fields, "mlp_layer_types": types})


def _read_activation(fields: Mapping[str, Any]) -> dict[str, Any]:
    if (name := fields["hidden_act"]) not in _ACTIVATIONS:
        raise ValueError(f"hidden_act = {name!r}: only {_ACTIVATIONS} are modelled")
    return {}


# transformers writes the first, and clamps by `swiglu_limit` whatever a file says.
_ACTIVATIONS = ("silu", "swigluoai")


_ROPE = rope(5000000.0, partial=1.0)
_DIMS, _FACTOR = "rotary_dim", "partial_rotary_factor"
_ROPE_DEFAULTS = {**_ROPE.defaults, _DIMS: 64}


def _read_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    dims, width = fields[_DIMS], fields["head_dim"]
    said = {**fields, **(fields["rope_parameters"] or {})}.get(_FACTOR) != 1.0
    if dims not in (None, width) and not said:
        raise ValueError(
            f"{_DIMS} = {dims} of head_dim {width}, without {_FACTOR}: transformers "
            f"rotates all {width} dims then, other readers {dims}; set {_FACTOR} to "
            "the part that is rotated"
        )
    return _ROPE.read(fields)


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    return {**_ROPE.write(config), _DIMS: config.rope_dim}


FAMILY = Family(
    model_type="minimax_m3_vl_text",
    architecture="MiniMaxM3VLForCausalLM",
    also_architectures=("MiniMaxM3SparseForCausalLM",),
    fields={
        **SIZES,
        **tokens(200034, 200020),
        **moe(
            num_experts=("num_local_experts", 128),
            num_experts_per_tok=("num_experts_per_tok", 4),
            intermediate_size=("intermediate_size", 3072),
            shared_intermediate_size=("shared_intermediate_size", 3072),
            routed_scaling_factor=("routed_scaling_factor", 2.0),
        ),
        "swiglu_limit": Field(7.0, ("swiglu_limit", "moe.swiglu_limit")),
        "swiglu_alpha": Field(1.702, ("swiglu_alpha", "moe.swiglu_alpha")),
        "dense_intermediate_size": Field(12288, "intermediate_size"),
        "num_key_value_heads": Field(4),
        "head_dim": Field(128),
        "max_position_embeddings": Field(524288),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(
        FieldTransform(tuple(_ROPE_DEFAULTS), _read_rope, _write_rope, _ROPE_DEFAULTS),
        FieldTransform(
            tuple(_ATTENTION_DEFAULTS),
            _read_attention,
            _write_attention,
            _ATTENTION_DEFAULTS,
        ),
        FieldTransform(
            ("mlp_layer_types", _EVERY),
            _read_dense,
            SPARSE_BY_TYPE.write,
            {"mlp_layer_types": None, _EVERY: None},
        ),
        FieldTransform(
            ("hidden_act",),
            _read_activation,
            lambda _: {"hidden_act": _ACTIVATIONS[0]},
            {"hidden_act": _ACTIVATIONS[0]},
        ),
    ),
    constants={
        "norm": "rms_zero_centered",
        "qk_norm": "head",
        "moe.scoring": "sigmoid",
        "moe.norm_topk_prob": True,
        "moe.correction_bias": True,
    },
    fixed={"attention_dropout": 0.0},
    # Noise on what enters the router, in training alone.
    passthrough={**EXPERT_TRAINING, "router_jitter_noise": 0.0},
    inert={
        "use_gemma_norm": True,
        "attention_output_gate": False,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "n_shared_experts": 1,
        "num_mtp_modules": 1,
    },
    optional=("block_indexer",),
    key_mappings=(key_mapping(_joined), key_mapping(_apart)),
    ignore=ignore_tied_head,
)
