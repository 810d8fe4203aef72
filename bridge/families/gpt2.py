"""GPT-2: learned positions, biases everywhere, kernels stored as [in, out].

Some checkpoints, OpenAI's own among them, lack the prefix `transformer.` and hold
masks.

Source: transformers `configuration_gpt2.py`, `modeling_gpt2.py`, `pytorch_utils.py
::Conv1D`.
"""

from bridge.families import _gpt
from bridge.families._blocks import HEAD, Rules
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._fields import tokens
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_NAMES = tuple(f"self_attn.{name}_proj" for name in "qkv")


_HEADS = "embed (heads head_dim) -> embed heads head_dim"
_BIAS = "(heads head_dim) -> heads head_dim"


def _conv1d(source: str, destination: str, layout: str, out: str) -> Rules:
    return (
        Rule(f"{source}.weight", f"{destination}.kernel", layout),
        Rule(f"{source}.bias", f"{destination}.bias", f"{out} -> {out}"),
    )


ATTENTION: Rules = (
    Rule(
        "attn.c_attn.weight",
        tuple(f"{name}.kernel" for name in _NAMES),
        (_HEADS,) * 3,
        dim=1,
    ),
    Rule("attn.c_attn.bias", tuple(f"{name}.bias" for name in _NAMES), (_BIAS,) * 3),
    *_conv1d(
        "attn.c_proj",
        "self_attn.o_proj",
        "(heads head_dim) embed -> heads head_dim embed",
        "embed",
    ),
)
"""Projections of attention, stored as [in, out]."""

MLP: Rules = (
    *_conv1d("mlp.c_fc", "mlp.up_proj", "embed mlp -> embed mlp", "mlp"),
    *_conv1d("mlp.c_proj", "mlp.down_proj", "mlp embed -> mlp embed", "embed"),
)
"""Projections of an MLP, stored as [in, out]."""


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del config, kind
    first = layer_norm("ln_1", "input_layernorm")
    second = layer_norm("ln_2", "pre_feedforward_layernorm")
    return first + ATTENTION + second + MLP


def layer_norm(source: str, destination: str) -> Rules:
    """Scale and bias of a layer norm."""
    return (
        Rule(f"{source}.weight", f"{destination}.scale", "embed -> embed"),
        Rule(f"{source}.bias", f"{destination}.bias", "embed -> embed"),
    )


def _key_mapping(prefix: str) -> KeyMapping:
    def table(name: str, destination: str, rows: str) -> Rule:
        layout = f"{rows} embed -> {rows} embed"
        return Rule(f"{prefix}{name}.weight", f"{destination}.embedding", layout)

    def outer(config: DecoderConfig) -> Rules:
        rules = (
            table("wte", "embed_tokens", "vocab"),
            table("wpe", "embed_positions", "positions"),
            *layer_norm(f"{prefix}ln_f", "norm"),
        )
        return rules + (() if config.tie_word_embeddings else (HEAD,))

    return KeyMapping(outer, Layers(prefix + "h.{layer}.", _layer))


def _ignore(config: DecoderConfig) -> tuple[str, ...]:
    masks = ("transformer.h.{layer}.attn.bias", "h.{layer}.attn.bias")
    return masks + (("lm_head.weight",) if config.tie_word_embeddings else ())


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fields={
        **tokens(50256, 50256),
        "vocab_size": Field(50257),
        **_gpt.SIZES,
    },
    transforms=(_gpt.INNER,),
    constants={"rope": None, **_gpt.LAYERS},
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    # These change no logit.
    passthrough={
        **_gpt.DROPOUT,
        "reorder_and_upcast_attn": False,
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
