"""Parts shared by HunYuan with and without experts: heads normed after the rope."""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import Rules, attention
from bridge.families._family import REQUIRED, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import TYPES, rope
from bridge.models import DecoderConfig

FIELDS = {
    **SIZES,
    **tokens(1, 2, 0),
    **attention_bias(),
    "head_dim": Field(REQUIRED),
    "max_position_embeddings": Field(2048),
    "rms_norm_eps": Field(1e-5, "norm_eps"),
}
CONSTANTS = {"qk_norm": "head", "qk_norm_after_rope": True}
FIXED = {"hidden_act": "silu"}
PASSTHROUGH = {"attention_dropout": 0.0, "eod_token_id": 3}
_ROPES = ("rope_scaling", "rope_parameters")


def attend(config: DecoderConfig) -> Rules:
    """The attention, whose norms have names of their own."""
    return attention(config, norms=("query_layernorm", "key_layernorm"))


def _rope() -> FieldTransform:
    base = rope(types=(*TYPES, "ntk_alpha"))

    def read(fields: Mapping[str, Any]) -> dict[str, Any]:
        ropes = {name: _by_alpha(fields.get(name)) for name in _ROPES}
        return base.read({**fields, **ropes})

    def write(config: DecoderConfig) -> dict[str, Any]:
        written = base.write(config)
        if config.rope is not None and config.rope.rope_type == "ntk_alpha":
            for name in _ROPES:
                # transformers asks for a factor, and does not read it.
                written[name] |= {"rope_type": "dynamic", "factor": 1.0}
        return written

    return FieldTransform(base.names, read, write, base.defaults)


def _by_alpha(given: Any) -> Any:
    """Gives a dynamic rope with an alpha, of which nothing else is read, our name."""
    if not isinstance(given, Mapping):
        return given
    kind = given.get("rope_type", given.get("type"))
    if kind == "ntk_alpha":
        raise ValueError("rope_type 'ntk_alpha': written 'dynamic', with an alpha")
    if kind != "dynamic" or not given.get("alpha"):
        return given
    kept = {name: given[name] for name in ("alpha", "rope_theta") if name in given}
    return {"rope_type": "ntk_alpha", **kept}


ROPE = _rope()
