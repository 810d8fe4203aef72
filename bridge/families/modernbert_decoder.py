"""ModernBERT's decoder (Ettin): sliding layers, and a transform before a tied head.

Layer norms without biases, of which the first attention has none, as embeddings are
normed. The head has a bias though its kernel is the embedding.

Source: transformers `configuration_modernbert_decoder.py`,
  `modeling_modernbert_decoder.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import Rules, attention, linear, norms, outside
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope_by_layer_type
from bridge.families._layer_types import FULL, SLIDING, interval
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_LOCAL, _WINDOW, _TYPES = "local_attention", "sliding_window", "layer_types"
_EVERY = "global_attn_every_n_layers"
_BASE = "global_rope_theta"


def _fused(leaf: str, to: str, layout: str) -> Rule:
    ours = (f"mlp.gate_proj.{to}", f"mlp.up_proj.{to}")
    return Rule(f"mlp.Wi.{leaf}", ours, (layout, layout))


def _mlp(config: DecoderConfig) -> Rules:
    biased = config.mlp_bias
    biases = (_fused("bias", "bias", "mlp -> mlp"),) if biased else ()
    back = "embed -> embed" if biased else None
    return (
        _fused("weight", "kernel", "mlp embed -> embed mlp"),
        *biases,
        *linear("mlp.Wo", "mlp.down_proj", "embed mlp -> mlp embed", back),
    )


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    names = {"mlp_norm": "pre_feedforward_layernorm"}
    if kind.norms_mixer:
        names |= {"attn_norm": "input_layernorm"}
    inner = attention(config, "attn.", "Wo") + _mlp(config)
    return inner + norms(names, bias=config.norm_bias)


def _outside(config: DecoderConfig) -> Rules:
    table = "model.embeddings.tok_embeddings"
    transform = config.head_transform
    assert transform is not None
    bias = "embed_out -> embed_out" if transform.bias else None
    kernel = "embed_out embed -> embed embed_out"
    between = {
        "model.embeddings.norm": "embed_norm",
        "lm_head.norm": "head_transform.norm",
    }
    return (
        *outside(table, "model.final_norm", "decoder")(config),
        *norms(between, bias=config.norm_bias),
        *linear("lm_head.dense", "head_transform.dense", kernel, bias),
    )


def _read_windows(fields: Mapping[str, Any]) -> dict[str, Any]:
    window, local = fields[_WINDOW], fields[_LOCAL]
    if window is None:
        window = (local or 0) // 2
    types = fields[_TYPES]
    if types is None:
        every = interval(fields, _EVERY)
        layers = range(fields["num_hidden_layers"])
        types = [SLIDING if layer % every else FULL for layer in layers]
    if window < 1 and SLIDING in types:
        raise ValueError(
            f"{_LOCAL} = {local!r}: layers of type {SLIDING} see half as many tokens, "
            "and at least one"
        )
    return {_WINDOW: max(window, 0) or None, _TYPES: tuple(types)}


def _write_windows(config: DecoderConfig) -> dict[str, Any]:
    window = config.sliding_window
    written = {_TYPES: config.layer_types, _LOCAL: window and 2 * window}
    return written if window is None else {**written, _WINDOW: window}


_ROPES = rope_by_layer_type(160000.0, 10000.0, "local_rope_theta")


def _read_ropes(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["rope_theta"] is not None:
        raise ValueError(
            f"rope_theta = {fields['rope_theta']!r}: transformers reads {_BASE} and "
            "local_rope_theta of this family; remove it"
        )
    if fields["rope_scaling"]:
        raise ValueError(
            f"rope_scaling = {fields['rope_scaling']!r}: write the rope of each type "
            "of layer into rope_parameters"
        )
    return _ROPES.read({**fields, "rope_theta": fields[_BASE]})


def _write_ropes(config: DecoderConfig) -> dict[str, Any]:
    written = {**_ROPES.write(config), "rope_scaling": None}
    written[_BASE] = written.pop("rope_theta")
    return written


def _ignore(config: DecoderConfig) -> tuple[str, ...]:
    return ("decoder.weight",) if config.tie_word_embeddings else ()


FAMILY = Family(
    model_type="modernbert-decoder",
    architecture="ModernBertDecoderForCausalLM",
    fields={
        **{
            name: field
            for name, field in SIZES.items()
            if name not in ("num_key_value_heads", "head_dim")
        },
        **tokens(50281, 50282, 50283),
        "vocab_size": Field(50368),
        "hidden_size": Field(768),
        "intermediate_size": Field(1152),
        "num_hidden_layers": Field(22),
        "num_attention_heads": Field(12),
        "max_position_embeddings": Field(8192),
        "hidden_activation": Field("gelu", "hidden_act"),
        "norm_eps": Field(1e-5),
        "norm_bias": Field(False),
        "attention_bias": Field(False, ("attention_bias", "attention_out_bias")),
        "mlp_bias": Field(False),
        "decoder_bias": Field(True, "head_bias"),
        "classifier_activation": Field("gelu", "head_transform.hidden_act"),
        "classifier_bias": Field(False, "head_transform.bias"),
        "tie_word_embeddings": Field(True),
    },
    transforms=(
        FieldTransform(
            (*_ROPES.names, _BASE),
            _read_ropes,
            _write_ropes,
            {**_ROPES.defaults, _BASE: None},
        ),
        FieldTransform(
            (_LOCAL, _WINDOW, _TYPES, _EVERY),
            _read_windows,
            _write_windows,
            {_LOCAL: 128, _WINDOW: None, _TYPES: None, _EVERY: 3},
        ),
    ),
    constants={
        "norm": "layer",
        "embedding_norm": True,
        "unnormed_mixer_layers": (0,),
    },
    # How weights are initialized, rates of dropout, and tokens of encoders.
    passthrough={
        "initializer_cutoff_factor": 2.0,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "classifier_dropout": 0.0,
        "cls_token_id": 50281,
        "sep_token_id": 50282,
    },
    key_mappings=(KeyMapping(_outside, Layers("model.layers.{layer}.", _layer)),),
    ignore=_ignore,
)
