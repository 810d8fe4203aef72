"""GPT, the first: a layer norms the sums of its outputs and the residual stream.

The second norm of a layer is here the first of the next one, which replaces the stream,
and that of the last layer the norm before the head. So a layer of another number than
transformers' has it, and the first layer has none before attention.

Source: transformers `configuration_openai.py`, `modeling_openai.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _gpt
from bridge.families._blocks import HEAD, Rules
from bridge.families._dim_sizes import before_capture
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import tokens
from bridge.families.gpt2 import ATTENTION, MLP, layer_norm
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del config, kind
    return ATTENTION + layer_norm("ln_1", "pre_feedforward_layernorm") + MLP


def _key_mapping(prefix: str) -> KeyMapping:
    def table(name: str, destination: str, rows: str) -> Rule:
        layout = f"{rows} embed -> {rows} embed"
        return Rule(f"{prefix}{name}.weight", f"{destination}.embedding", layout)

    def norm_behind(layer: str | int, destination: str) -> Rules:
        return layer_norm(f"{prefix}h.{layer}.ln_2", destination)

    def outer(config: DecoderConfig) -> Rules:
        rules = (
            table("tokens_embed", "embed_tokens", "vocab"),
            table("positions_embed", "embed_positions", "positions"),
            *norm_behind(config.num_hidden_layers - 1, "norm"),
        )
        for number, stack in enumerate(config.layer_stacks):
            if stack.kind.norms_mixer:
                layer = "{" + before_capture(number) + "}"
                rules += norm_behind(layer, f"{stack.path}.input_layernorm")
        return rules + (() if config.tie_word_embeddings else (HEAD,))

    return KeyMapping(outer, Layers(prefix + "h.{layer}.", _layer))


def _ignore(config: DecoderConfig) -> tuple[str, ...]:
    masks = ("transformer.h.{layer}.attn.bias", "h.{layer}.attn.bias")
    return masks + (("lm_head.weight",) if config.tie_word_embeddings else ())


# An MLP is four times as wide as the residual stream, whatever the file says.
_WIDTH = FieldTransform(
    ("n_embd",),
    lambda fields: {
        "hidden_size": fields["n_embd"],
        "intermediate_size": 4 * fields["n_embd"],
    },
    lambda config: {"n_embd": config.hidden_size},
    {"n_embd": 768},
)

_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}


def _read_activation(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["afn"] not in _ACTIVATIONS:
        raise ValueError(
            f"afn = {fields['afn']!r}: transformers knows {', '.join(_ACTIVATIONS)}"
        )
    return {"hidden_act": _ACTIVATIONS[fields["afn"]]}


def _write_activation(config: DecoderConfig) -> dict[str, Any]:
    return {"afn": next(k for k, v in _ACTIVATIONS.items() if v == config.hidden_act)}


_OTHERS = ("n_embd", "activation_function")

FAMILY = Family(
    model_type="openai-gpt",
    architecture="OpenAIGPTLMHeadModel",
    fields={
        **tokens(None, None),
        **{name: f for name, f in _gpt.SIZES.items() if name not in _OTHERS},
        "vocab_size": Field(40478),
        "n_positions": Field(512, "max_position_embeddings"),
    },
    transforms=(
        _WIDTH,
        FieldTransform(("afn",), _read_activation, _write_activation, {"afn": "gelu"}),
    ),
    constants={
        "rope": None,
        **_gpt.LAYERS,
        "norm_placement": "in_stream",
        "unnormed_mixer_layers": (0,),
    },
    # These change no logit.
    passthrough={
        **_gpt.DROPOUT,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "summary_activation": None,
        "summary_proj_to_labels": True,
        "summary_first_dropout": 0.1,
        "n_ctx": None,
        "task_specific_params": None,
    },
    key_mappings=(_key_mapping("transformer."), _key_mapping("")),
    ignore=_ignore,
    fan_in_fan_out=True,
)
