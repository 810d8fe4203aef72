"""Phi-3.5-MoE: top-2 routing by SparseMixer, layer norms, attention and head biases.

As in transformers, the frequencies of all texts are divided by `short_factor`; texts
beyond the original length differ by `long_mscale` alone. Experts are chosen as in
evaluation in training too, where transformers samples them.

Source: transformers `configuration_phimoe.py`, `modeling_phimoe.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families._blocks import (
    FUSED_EXPERTS,
    PRE_NORMS,
    Rules,
    attention,
    experts,
    ignore_tied_head,
    key_mapping,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import EXPERT_TRAINING, SIZES, attention_bias, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import window_of_all
from bridge.models import DecoderConfig, LayerKind

_AT = "block_sparse_moe."
_SPLIT = router(_AT + "gate") + experts(
    _AT + "experts.{expert}.", gate="w1", up="w3", down="w2"
)
_FUSED = router("mlp.router") + FUSED_EXPERTS


def _layer(inner: Rules) -> Callable[[DecoderConfig, LayerKind], Rules]:
    own = inner + norms(PRE_NORMS, bias=True)
    return lambda config, _: attention(config) + own


_LENGTH = "original_max_position_embeddings"
_BASE = rope(1e6, types=("default", "longrope"), mscales=True)


def _read_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a rope; transformers reads the original length that is in it alone."""
    values, beside = _BASE.read(fields), fields[_LENGTH]
    read, wrong = values["rope"], []
    if read.rope_type == "longrope" and read.short_mscale is None:
        wrong.append("longrope: short_mscale and long_mscale are missing")
    length = read.original_max_position_embeddings
    if beside is not None and length not in (None, beside):
        wrong.append(
            f"{_LENGTH} is {length} in the rope, where this family reads it, and "
            f"{beside} beside it"
        )
    if wrong:
        raise ValueError("\n".join(wrong))
    return values


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    assert config.rope is not None
    length = config.rope.original_max_position_embeddings
    return {**_BASE.write(config), _LENGTH: length}


FAMILY = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    also_architectures=("PhiMoEForCausalLM",),
    fields={
        **SIZES,
        **tokens(1, 2),
        **attention_bias(),
        **moe(
            num_experts=("num_local_experts", 16),
            num_experts_per_tok=("num_experts_per_tok", 2),
        ),
        "intermediate_size": Field(
            6400, ("intermediate_size", "moe.intermediate_size")
        ),
        "num_key_value_heads": Field(8),
        "max_position_embeddings": Field(4096 * 32),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "lm_head_bias": Field(False, "head_bias"),
        "router_jitter_noise": Field(0.01, "moe.sparsemixer_jitter"),
    },
    transforms=(
        FieldTransform(
            (*_BASE.names, _LENGTH),
            _read_rope,
            _write_rope,
            {**_BASE.defaults, _LENGTH: None},
        ),
        window_of_all(),
    ),
    constants={"norm": "layer", "norm_bias": True, "moe.scoring": "sparsemixer"},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    # Noise on what enters a sparse MLP, in training alone.
    passthrough={**EXPERT_TRAINING, "input_jitter_noise": 0.0},
    key_mappings=(key_mapping(_layer(_SPLIT)), key_mapping(_layer(_FUSED))),
    ignore=ignore_tied_head,
)
