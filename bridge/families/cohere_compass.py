"""Command's text part of models that see (North Micro Vision): a rope by type of layer.

As Command R7B, but halves of heads turn, and the layers of a type without a rope, those
of full attention in published files, do not.

Source: transformers `configuration_cohere_compass.py`, `modeling_cohere_compass.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import cohere
from bridge.families._blocks import ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._hf_rope import TYPES, read_rope, write_rope
from bridge.families._layer_types import FULL, SLIDING, sliding_or_full
from bridge.models import DecoderConfig, RopeConfig

_NAME = "rope_parameters"
# How positions of images share the dims, and what published files have beside the
# ropes of the types, which transformers takes out.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
_BESIDE = ("rope_theta", "rope_type")
_TYPES = sliding_or_full(lambda fields: [FULL] * fields["num_hidden_layers"])


def _read(fields: Mapping[str, Any]) -> dict[str, Any]:
    types = _TYPES.read(fields)["layer_types"]
    ropes = _ropes(fields, types)
    given = {kind: rope for kind, rope in ropes.items() if rope is not None}
    without = {kind for kind in types if ropes[kind] is None}
    full = given.get(FULL)
    return {
        "rope": given.get(SLIDING) if full is None else full,
        "sliding_rope": given.get(SLIDING) if full is not None else None,
        "learned_positions": False,
        "no_rope_layers": tuple(
            layer for layer, kind in enumerate(types) if given and kind in without
        ),
    }


def _ropes(
    fields: Mapping[str, Any], types: tuple[str, ...]
) -> dict[str, RopeConfig | None]:
    """Returns the rope of each type that layers have."""
    nested = fields[_NAME]
    kinds = dict.fromkeys(types)
    if not isinstance(nested, Mapping) or kinds.keys() - nested.keys():
        raise ValueError(
            f"{_NAME} = {nested!r}: a rope, or null, for each of {', '.join(kinds)}"
        )
    if unknown := sorted(nested.keys() - {FULL, SLIDING, *_BESIDE}):
        raise ValueError(f"{_NAME} has {unknown}, which are no types of layers")
    if given := [name for name in ("rope_theta", "rope_scaling") if fields[name]]:
        raise ValueError(f"{given}: transformers reads {_NAME} alone of this family")
    return {kind: _rope(nested[kind], fields) for kind in kinds}


def _rope(given: Any, fields: Mapping[str, Any]) -> RopeConfig | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.get("rope_theta") is None:
        raise ValueError(f"{_NAME} has {given!r}: each rope says its rope_theta")
    plain = {key: value for key, value in given.items() if key not in _OF_IMAGES}
    longest = "max_position_embeddings"
    rope = read_rope({_NAME: plain, longest: fields[longest]})
    if rope.rope_type not in TYPES or rope.partial_rotary_factor != 1:
        raise ValueError(f"{_NAME} has {given!r}: whole heads turn, of types {TYPES}")
    return rope


def _write(config: DecoderConfig) -> dict[str, Any]:
    types = config.layer_types or (FULL,) * config.num_hidden_layers
    still = {types[layer] for layer in config.no_rope_layers}
    ropes = {FULL: config.rope, SLIDING: config.sliding_rope or config.rope}
    return {
        _NAME: {
            kind: None
            if rope is None or kind in still
            else write_rope(rope)["rope_parameters"]
            for kind, rope in ropes.items()
            if kind in types
        },
    }


_SCALE = "logit_scale"

FAMILY = Family(
    model_type="cohere_compass_text",
    architecture="CohereCompassForCausalLM",
    fields={
        **{n: field for n, field in cohere.FAMILY.fields.items() if n != _SCALE},
        "sliding_window": Field(4096),
    },
    transforms=(
        _TYPES,
        FieldTransform(
            (_NAME, "rope_theta", "rope_scaling"),
            _read,
            _write,
            dict.fromkeys((_NAME, "rope_theta", "rope_scaling")),
        ),
        FieldTransform(
            (_SCALE,),
            lambda fields: {_SCALE: 1.0 if fields[_SCALE] is None else fields[_SCALE]},
            lambda config: {_SCALE: config.logit_scale},
            {_SCALE: None},
        ),
    ),
    constants=cohere.FAMILY.constants,
    fixed=cohere.FAMILY.fixed,
    passthrough={"pooling": None},
    optional=("rope",),
    key_mappings=(key_mapping(cohere.layer),),
    ignore=ignore_tied_head,
)
