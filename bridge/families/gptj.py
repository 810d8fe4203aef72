"""GPT-J: attention and MLP side by side, a head with a bias, q, k and v without.

Source: transformers `configuration_gptj.py`, `modeling_gptj.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _gpt
from bridge.families._blocks import Rules, attention, norms, outside, ungated_mlp
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import tokens
from bridge.models import DecoderConfig, LayerKind, RopeConfig


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    inner = ungated_mlp(config, "mlp.fc_in", "mlp.fc_out")
    own = norms({"ln_1": "input_layernorm"}, bias=True)
    return attention(config, "attn.", "out_proj") + inner + own


def _read_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    dims, width = fields["rotary_dim"], fields["n_embd"] // fields["n_head"]
    if not isinstance(dims, int) or not 0 < dims <= width:
        raise ValueError(f"rotary_dim = {dims!r}: an integer of 1 to {width}")
    rope = RopeConfig(partial_rotary_factor=dims / width, interleaved=True)
    return {"rope": rope}


_ROPE = FieldTransform(
    ("rotary_dim",),
    _read_rope,
    lambda config: {"rotary_dim": config.rope_dim},
    {"rotary_dim": 64},
)
_STALE = tuple(
    f"transformer.h.{{layer}}.attn.{name}"
    for name in ("bias", "masked_bias", "embed_positions")
)

FAMILY = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    fields={
        **tokens(50256, 50256),
        **{k: v for k, v in _gpt.SIZES.items() if k != "tie_word_embeddings"},
        "vocab_size": Field(50400),
        "n_positions": Field(2048, "max_position_embeddings"),
        "n_embd": Field(4096, "hidden_size"),
        "n_layer": Field(28, "num_hidden_layers"),
        "n_head": Field(16, "num_attention_heads"),
    },
    transforms=(_gpt.INNER, _ROPE),
    constants={
        "norm": "layer",
        "norm_bias": True,
        "norm_placement": "parallel",
        "gated_mlp": False,
        "mlp_bias": True,
        "head_bias": True,
    },
    fixed={"tie_word_embeddings": False},
    passthrough=dict.fromkeys(_gpt.DROPOUT, 0.0),
    key_mappings=(
        KeyMapping(
            outside("transformer.wte", "transformer.ln_f"),
            Layers("transformer.h.{layer}.", _layer),
        ),
    ),
    ignore=lambda config: _STALE,
)
