"""BioGPT: learned positions that begin at row 2, scaled embeddings, biases everywhere.

Source: transformers `configuration_biogpt.py`, `modeling_biogpt.py`.
"""

from bridge.families import _gpt
from bridge.families._blocks import Rules, outside
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._fields import SIZES, tokens
from bridge.families.opt import layer
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule

_HEAD = "output_projection"
_OUTSIDE = outside("biogpt.embed_tokens", "biogpt.layer_norm", _HEAD)
_POSITIONS = Rule(
    "biogpt.embed_positions.weight",
    "embed_positions.embedding",
    "positions embed -> positions embed",
)


def _outer(config: DecoderConfig) -> Rules:
    return (*_OUTSIDE(config), _POSITIONS)


def _ignore(config: DecoderConfig) -> tuple[str, ...]:
    return (f"{_HEAD}.weight",) if config.tie_word_embeddings else ()


_NOT_OF_BIOGPT = ("num_key_value_heads", "head_dim")

FAMILY = Family(
    model_type="biogpt",
    architecture="BioGptForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name not in _NOT_OF_BIOGPT},
        **tokens(0, 2, 1),
        "vocab_size": Field(42384),
        "hidden_size": Field(1024),
        "intermediate_size": Field(4096),
        "num_hidden_layers": Field(24),
        "num_attention_heads": Field(16),
        "max_position_embeddings": Field(1024),
        "hidden_act": Field("gelu"),
        "tie_word_embeddings": Field(True),
    },
    transforms=(_gpt.scaled_embeddings("hidden_size"),),
    constants={
        "rope": None,
        "position_offset": 2,
        "norm_eps": 1e-5,
        **_gpt.LAYERS,
    },
    # transformers reads no epsilon of the file. Dropout is not part of the decoder.
    passthrough={
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "activation_dropout": 0.0,
        "layerdrop": 0.0,
    },
    key_mappings=(KeyMapping(_outer, Layers("biogpt.layers.{layer}.", layer)),),
    ignore=_ignore,
)
