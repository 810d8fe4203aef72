"""Command A Plus: Command A with experts, some of them shared, behind dense layers.

Source: transformers `configuration_cohere2_moe.py`, `modeling_cohere2_moe.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families import _deepseek, cohere
from bridge.families._blocks import (
    FUSED_EXPERTS,
    Rules,
    attention,
    experts,
    ignore_tied_head,
    key_mapping,
    mlp,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, attention_bias, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import (
    FULL,
    SLIDING,
    first_dense_or_by_type,
    interval,
    sliding_or_full,
)
from bridge.models import DecoderConfig, LayerKind

Fields = Mapping[str, Any]


def _layer(run: Rules) -> Callable[[DecoderConfig, LayerKind], Rules]:
    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        assert config.moe is not None
        inner = mlp(config)
        if kind.channels == "sparse":
            has_shared = config.moe.shared_intermediate_size is not None
            inner = router() + run + (_deepseek.shared(config) if has_shared else ())
        own = norms({"input_layernorm": "input_layernorm"})
        return attention(config) + inner + own

    return rules


_FIRST, _EVERY = "prefix_dense_sliding_window_pattern", "sliding_window_pattern"
_DENSE = first_dense_or_by_type(0)


def _absent(fields: Fields) -> list[str]:
    first, every = interval(fields, _FIRST), interval(fields, _EVERY)
    dense, layers = fields["first_k_dense_replace"], fields["num_hidden_layers"]
    if dense > layers:
        raise ValueError(f"first_k_dense_replace = {dense}: there are {layers} layers")
    rest = layers - dense
    return [
        SLIDING if (i + 1) % period else FULL
        for count, period in ((dense, first), (rest, every))
        for i in range(count)
    ]


_TYPES = sliding_or_full(_absent, {_FIRST: 1, _EVERY: 4})


def _read_types(fields: Fields) -> dict[str, Any]:
    types = _TYPES.read(fields)["layer_types"]
    if fields["sliding_window"] is None and SLIDING in types:
        raise ValueError(f"sliding_window = None: layer_types has {SLIDING}")
    turned = _DENSE.read(fields)["dense_layers"] if fields[_FIRST] == 1 else ()
    full = (i for i, kind in enumerate(types) if kind == FULL)
    return {
        "layer_types": types,
        "sliding_window": fields["sliding_window"],
        "no_rope_layers": tuple(i for i in full if i not in turned),
    }


def _write_types(config: DecoderConfig) -> dict[str, Any]:
    types = _TYPES.write(config)["layer_types"]
    still = set(config.dense_layers) & set(config.no_rope_layers)
    # Where the file has types, 1 says that all dense layers turn, another that only
    # those do that slide.
    return {
        "layer_types": types,
        "sliding_window": config.sliding_window,
        _FIRST: 2 if still else 1,
    }


_LAYER_TYPES = FieldTransform(
    (*_TYPES.names, "sliding_window"),
    _read_types,
    _write_types,
    {**_TYPES.defaults, "sliding_window": 4096},
)

_DENSE_WIDTH, _SHARED = "prefix_dense_intermediate_size", "num_shared_experts"
_COMBINED = "shared_expert_combination_strategy"


def _read_widths(fields: Fields) -> dict[str, Any]:
    width, dense = fields["intermediate_size"], fields[_DENSE_WIDTH]
    shared, combined = fields[_SHARED], fields[_COMBINED]
    if combined not in ("average", "sum"):
        raise ValueError(f"{_COMBINED} = {combined!r}: 'average' or 'sum'")
    values = {
        "intermediate_size": width if dense is None else dense,
        "moe.intermediate_size": width,
    }
    if not shared:
        return values
    return {
        **values,
        "moe.shared_intermediate_size": shared * width,
        "moe.shared_average": combined == "average",
    }


def _write_widths(config: DecoderConfig) -> dict[str, Any]:
    sizes = config.moe
    assert sizes is not None
    return {
        "intermediate_size": sizes.intermediate_size,
        _DENSE_WIDTH: config.intermediate_size,
        _SHARED: (sizes.shared_intermediate_size or 0) // sizes.intermediate_size,
        _COMBINED: "average" if sizes.shared_average else "sum",
    }


_WIDTHS = FieldTransform(
    ("intermediate_size", _DENSE_WIDTH, _SHARED, _COMBINED),
    _read_widths,
    _write_widths,
    {"intermediate_size": 22528, _DENSE_WIDTH: None, _SHARED: 0, _COMBINED: "average"},
)

_ROPE = rope(interleaved=True)


def _read_rope(fields: Fields) -> dict[str, Any]:
    """Reads a rope, whose own base is before that beside it."""
    if fields["rope_scaling"]:
        raise ValueError(
            f"rope_scaling = {fields['rope_scaling']}: transformers reads the rope of "
            "this model from rope_parameters alone"
        )
    given = fields["rope_parameters"] or {}
    inside = isinstance(given, Mapping) and given.get("rope_theta") is not None
    return _ROPE.read({**fields, "rope_theta": None} if inside else fields)


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    return {k: v for k, v in _ROPE.write(config).items() if k != "rope_scaling"}


_SCORES = "expert_selection_fn"


def _read_scores(fields: Fields) -> dict[str, Any]:
    if fields[_SCORES] == "softmax":
        return {"moe.scoring": "softmax_of_chosen"}
    if fields[_SCORES] != "sigmoid":
        raise ValueError(f"{_SCORES} = {fields[_SCORES]!r}: 'softmax' or 'sigmoid'")
    return {
        "moe.scoring": "sigmoid",
        "moe.norm_topk_prob": fields["norm_topk_prob"],
        "moe.norm_topk_eps": 0.0,
        "moe.rounded_weights": True,
    }


def _write_scores(config: DecoderConfig) -> dict[str, Any]:
    assert config.moe is not None
    if config.moe.scoring == "softmax_of_chosen":
        return {_SCORES: "softmax", "norm_topk_prob": True}
    return {_SCORES: "sigmoid", "norm_topk_prob": config.moe.norm_topk_prob}


def _read_norm(fields: Fields) -> dict[str, Any]:
    epsilon = fields["rms_norm_eps"]
    if epsilon is None:
        return {"norm": "layer", "norm_eps": fields["layer_norm_eps"]}
    return {"norm": "rms", "norm_eps": epsilon}


def _write_norm(config: DecoderConfig) -> dict[str, Any]:
    if config.norm == "layer":
        return {"layer_norm_eps": config.norm_eps, "rms_norm_eps": None}
    return {"layer_norm_eps": 1e-5, "rms_norm_eps": config.norm_eps}


FAMILY = Family(
    model_type="cohere2_moe",
    architecture="Cohere2MoeForCausalLM",
    fields={
        **{name: f for name, f in SIZES.items() if name != "intermediate_size"},
        **tokens(5, 255001, 0),
        **attention_bias(),
        **moe(
            num_experts=("num_experts", 8),
            num_experts_per_tok=("num_experts_per_tok", 2),
        ),
        "head_dim": Field(128),
        "tie_word_embeddings": Field(True),
        "max_position_embeddings": Field(8192),
        "logit_scale": Field(0.0625),
    },
    transforms=(
        FieldTransform(
            _ROPE.names, _read_rope, _write_rope, {**_ROPE.defaults, "rope_theta": 1e4}
        ),
        _DENSE,
        _LAYER_TYPES,
        _WIDTHS,
        FieldTransform(
            (_SCORES, "norm_topk_prob"),
            _read_scores,
            _write_scores,
            {_SCORES: "softmax", "norm_topk_prob": True},
        ),
        FieldTransform(
            ("layer_norm_eps", "rms_norm_eps"),
            _read_norm,
            _write_norm,
            {"layer_norm_eps": 1e-5, "rms_norm_eps": None},
        ),
    ),
    constants={"norm_placement": "parallel"},
    fixed=cohere.FAMILY.fixed,
    passthrough={"output_router_logits": False},
    key_mappings=(key_mapping(_layer(experts())), key_mapping(_layer(FUSED_EXPERTS))),
    ignore=ignore_tied_head,
)
