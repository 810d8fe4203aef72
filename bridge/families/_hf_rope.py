"""Rotary embedding in Hugging Face config files, in two formats.

They are `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (5). A
reader that knows one format takes the default where a file has the other, in silence: a
base of 10,000 where 500,000 was meant.

Source: transformers `modeling_rope_utils.py::RotaryEmbeddingConfigMixin`, and the
`convert_rope_params_to_dict` of `configuration_gemma3.py`, `configuration_olmo3.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.families._field_transform import FieldTransform
from bridge.models import DecoderConfig, RopeConfig
from bridge.models._rope_config import NEEDED, OPTIONAL, STRETCHING

Fields = Mapping[str, Any]
_ROPE_FIELDS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
)
_BESIDE = ("rope_theta", "partial_rotary_factor")
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_LAYER_TYPES = ("full_attention", "sliding_attention")
_PARTIAL = "proportional"
TYPES = tuple(kind for kind in NEEDED if kind not in ("ntk_alpha", "proportional"))
"""Types of rope that transformers computes for every family of one rope."""
# Names of types that became others.
_ALIASES = {"su": "longrope"}
_UNSAID: Any = object()
"""Stands for a field that the file does not have, where null means something."""


def rope(
    theta: float = 10000.0,
    *,
    partial: float | None = None,
    types: tuple[str, ...] = TYPES,
    interleaved: bool = False,
    interleave_field: str | None = None,
    clockwise: bool = False,
    names: tuple[str, str] = _BESIDE,
    original_length: int | None = None,
    absent: Fields | None = None,
    mscales: bool = False,
) -> FieldTransform:
    """Reads and writes one rope for all layers.

    Args:
      theta: What transformers takes for `rope_theta` where the file does not say.
      partial: The same for `partial_rotary_factor`; None if the family rotates whole
        heads whatever the file says.
      types: The types of rope that the family has.
      interleaved: Whether the family's pairs are neighbours.
      interleave_field: The field of the file that says so instead.
      clockwise: Whether the family's pairs turn the other way.
      names: Names of base and factor beside the rope, where transformers reads others
        than `rope_theta` and `partial_rotary_factor`; those are refused then.
      original_length: What a family takes for `original_max_position_embeddings` if
        it keeps that beside the rope and not in it; None if it does not.
      absent: The rope of a file that says nothing of one; None means unscaled. Where it
        has a base, a `rope_theta` beside it is not read, and refused.
      mscales: Whether the family reads `short_mscale` and `long_mscale` of `longrope`.
    """
    said = {**dict.fromkeys((*_ROPE_FIELDS, *names)), names[1]: partial}
    if interleave_field is not None:
        said[interleave_field] = interleaved
    if original_length is not None:
        said[_ORIGINAL_LENGTH] = original_length

    def read(fields: Fields) -> dict[str, Any]:
        defaults: dict[str, Any] = {"rope_theta": theta}
        if original_length is not None:
            defaults[_ORIGINAL_LENGTH] = fields[_ORIGINAL_LENGTH]
        pairs = fields[interleave_field] if interleave_field else interleaved
        beside = {ours: fields[name] for ours, name in zip(_BESIDE, names, strict=True)}
        value = read_rope({**fields, **beside}, defaults, absent or {})
        _check_beside(fields, value, names)
        if absent and not (fields["rope_scaling"] or fields["rope_parameters"]):
            _check_base(fields[names[0]], absent)
        if partial is None:
            _check_whole(value)
        _check_type(value, types)
        if not mscales:
            _check_mscales(value)
        turned = {"interleaved": pairs, "clockwise": clockwise}
        return {"rope": dataclasses.replace(value, **turned)}

    def write(config: DecoderConfig) -> dict[str, Any]:
        assert config.rope is not None
        written = write_rope(config.rope, partial)
        for ours, name in zip(_BESIDE, names, strict=True):
            if ours in written:
                written[name] = written.pop(ours)
        if interleave_field is not None:
            written[interleave_field] = config.rope.interleaved
        if original_length is not None:
            length = config.rope.original_max_position_embeddings
            written[_ORIGINAL_LENGTH] = length or original_length
        return written

    return FieldTransform(tuple(said), read, write, said)


def rope_of_dims(theta: float) -> FieldTransform:
    """Reads and writes one rope, of which `rotary_dim` may be the number of dims.

    A factor wins over it, as in transformers. There a factor of null does too, and
    means whole heads; other readers take it for none, so it is refused.

    Args:
      theta: As for `rope`.
    """
    base, name = rope(theta, partial=1.0), "rotary_dim"

    def read(fields: Fields) -> dict[str, Any]:
        factor, dims = fields["partial_rotary_factor"], fields[name]
        if factor is _UNSAID:
            factor = None if dims is None else dims / fields["head_dim"]
        elif factor is None and dims not in (None, fields["head_dim"]):
            raise ValueError(
                f"partial_rotary_factor = None beside {name} = {dims}: transformers "
                f"rotates all {fields['head_dim']} dims of a head then, other readers "
                f"{dims}; remove partial_rotary_factor, or set it to the part that is "
                "rotated"
            )
        return base.read({**fields, "partial_rotary_factor": factor})

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {**base.write(config), name: config.rope_dim}

    said = {**base.defaults, name: None, "partial_rotary_factor": _UNSAID}
    return FieldTransform(tuple(said), read, write, said)


def rope_by_layer_type(
    theta: float,
    sliding_theta: float,
    sliding_name: str | None = None,
    *,
    default: Fields | None = None,
    partial: float | None = None,
) -> FieldTransform:
    """Reads and writes a rope for full layers and one for those that slide.

    In the format of transformers 4 the scaling is the full layers' alone.

    Args:
      theta: What transformers takes for the full layers' base.
      sliding_theta: The same for the sliding ones.
      sliding_name: Field of transformers 4 for the sliding layers' base; None if the
        family has none, where the base is `sliding_theta` whatever `rope_theta` says.
      default: Rope of the full layers of a file that says nothing of ropes, in a
        family whose ropes may be `proportional`.
      partial: The part of a head that turns where a rope does not say, in a family with
        `default` whose ropes are all of that type; None if it turns whole heads.
    """
    names = (*_ROPE_FIELDS, *([sliding_name] if sliding_name else []))

    def read(fields: Fields) -> dict[str, Any]:
        nested = _nested_ropes(fields)
        nested = nested or ({} if default is None else {_LAYER_TYPES[0]: default})
        full, sliding = (nested.get(kind) or {} for kind in _LAYER_TYPES)
        local = fields[sliding_name] if sliding_name else None
        # In these families transformers completes a given rope by what is beside it.
        beside_it = fields["rope_theta"] if default and sliding else None
        old = {
            name: fields[name]
            for name in ("rope_theta", "rope_scaling", "max_position_embeddings")
            if fields.get(name) is not None
        }
        absent = {} if partial is None else {"partial_rotary_factor": partial}
        ropes = {
            "rope": read_rope(
                old | ({"rope_parameters": full} if full else {}),
                {"rope_theta": theta, **absent},
            ),
            "sliding_rope": read_rope(
                {"rope_parameters": sliding, **_lengths(fields)},
                {"rope_theta": local or beside_it or sliding_theta, **absent},
            ),
        }
        beside = fields["partial_rotary_factor"] if default is None else None
        types = TYPES if default is None else (*TYPES, _PARTIAL)
        for rope in ropes.values():
            if partial is None:
                _check_of_layer_type(rope, types, beside)
            else:
                _check_type(rope, ("default",))
        return ropes

    def write(config: DecoderConfig) -> dict[str, Any]:
        assert config.rope is not None
        full = write_rope(config.rope, partial)
        sliding = write_rope(config.sliding_rope or config.rope, partial)
        parameters = full["rope_parameters"], sliding["rope_parameters"]
        full["rope_parameters"] = dict(zip(_LAYER_TYPES, parameters, strict=True))
        if default is not None:  # families that transformers 4 does not have
            return {"rope_parameters": full["rope_parameters"]}
        if sliding_name is not None:
            full[sliding_name] = sliding["rope_theta"]
        return full

    return FieldTransform(names, read, write, dict.fromkeys(names))


def _nested_ropes(fields: Fields) -> Fields:
    """Returns the rope of each type of layer that a file gives; empty for none."""
    nested = fields.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or set(nested) - set(_LAYER_TYPES):
        raise ValueError(
            f"rope_parameters = {nested!r}: this family has one rope for each of "
            f"{', '.join(_LAYER_TYPES)}"
        )
    _check_type_key(fields.get("rope_scaling"))
    return nested


def _check_of_layer_type(
    rope: RopeConfig, types: tuple[str, ...], beside: float | None
) -> None:
    """Refuses what transformers does not read in families of two ropes."""
    _check_type(rope, types)
    _check_mscales(rope)
    if rope.rope_type != _PARTIAL:
        _check_whole(rope, beside)
    if rope.truncate is False:
        raise ValueError(
            "truncate = False: transformers reads the field of a rope for all "
            "layers alone; remove it or set it to true"
        )


def read_rope(
    fields: Fields, defaults: Fields | None = None, absent: Fields | None = None
) -> RopeConfig:
    """Reads either format, or both if they agree.

    Args:
      fields: A whole config file.
      defaults: What a value that the file does not give is; None for Llama's.
      absent: The rope of a file that gives none.

    Raises:
      ValueError: If the formats differ, or a file says what is not modelled.
    """
    defaults = {"rope_theta": 10000.0, **(defaults or {})}
    given = {
        name: _read_format(name, fields[name], fields, defaults)
        for name in ("rope_scaling", "rope_parameters")
        if fields.get(name)
    }
    if len(set(given.values())) > 1:
        raise ValueError(f"rope_scaling and rope_parameters differ: {given}")
    if given:
        return next(iter(given.values()))
    return _read_format("", absent or {}, fields, defaults)


def write_rope(rope: RopeConfig, partial: float | None = None) -> dict[str, Any]:
    """Writes both formats, so that transformers 4 and 5 read the same.

    Args:
      rope: What to write.
      partial: What a reader takes for `partial_rotary_factor` where the file does not
        say; None means 1.
    """
    extra = {
        name: list(value) if isinstance(value, tuple) else value
        for name in STRETCHING
        if (value := getattr(rope, name)) is not None
    }
    scaling = {"rope_type": rope.rope_type, **extra}
    parameters = {"rope_theta": rope.rope_theta, **scaling}
    written = {
        "rope_theta": rope.rope_theta,
        "rope_scaling": scaling if extra else None,
        "rope_parameters": parameters,
    }
    if rope.partial_rotary_factor != (1 if partial is None else partial):
        parameters["partial_rotary_factor"] = rope.partial_rotary_factor
        written["partial_rotary_factor"] = rope.partial_rotary_factor
    return written


def _check_type_key(scaling: Any) -> None:
    """Refuses a key that transformers does not read in families of two ropes."""
    if (
        isinstance(scaling, Mapping)
        and "type" in scaling
        and "rope_type" not in scaling
    ):
        raise ValueError(
            f"rope_scaling = {dict(scaling)!r}: transformers reads rope_type alone of "
            "this family, and leaves its layers unscaled; write rope_type for type"
        )


def _check_beside(fields: Fields, rope: RopeConfig, names: tuple[str, str]) -> None:
    """Refuses other numbers where transformers, of this family, does not read them."""
    wrong = [
        f"{ours} = {fields[ours]!r}: transformers reads {name} of this family, and "
        f"{getattr(rope, ours)} here"
        for ours, name in zip(_BESIDE, names, strict=True)
        if fields.get(ours) not in (None, getattr(rope, ours)) and ours != name
    ]
    if wrong:
        raise ValueError("\n".join(wrong))


def _check_base(theta: float | None, absent: Fields) -> None:
    """Refuses a base beside a default rope that has its own."""
    base = absent.get("rope_theta")
    if base is not None and theta not in (None, base):
        raise ValueError(
            f"rope_theta = {theta!r} without a rope: transformers takes its own, of "
            f"base {base}; write yours into rope_parameters"
        )


def _check_type(rope: RopeConfig, types: tuple[str, ...]) -> None:
    if rope.rope_type not in types:
        raise ValueError(f"rope_type {rope.rope_type!r}: this family has {types}")


def _check_mscales(rope: RopeConfig) -> None:
    if rope.short_mscale is not None or rope.long_mscale is not None:
        raise ValueError(
            f"short_mscale = {rope.short_mscale}, long_mscale = {rope.long_mscale}: "
            "transformers does not read them of this family; remove them"
        )


def _check_whole(rope: RopeConfig, beside: float | None = None) -> None:
    """Refuses a factor that transformers leaves unread in families of whole heads."""
    for factor in (rope.partial_rotary_factor, beside):
        if factor not in (None, 1):
            raise ValueError(
                f"partial_rotary_factor = {factor!r}: this family rotates whole heads, "
                "and transformers does not read the field; remove it or set it to 1"
            )


def _read_format(name: str, rope: Any, fields: Fields, defaults: Fields) -> RopeConfig:
    """Reads the rope that is the value of the field `name`."""
    if not isinstance(rope, Mapping):
        raise ValueError(f"{name} = {rope!r} is not an object")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in rope.items()
        if value is not None
    }
    if "truncate" in rope:  # where null counts as false, and absence as true
        values["truncate"] = rope["truncate"] or False
    old_type = values.pop("type", "default")
    kind: Any = values.setdefault("rope_type", old_type)
    kind = values["rope_type"] = _ALIASES.get(kind, kind)
    if kind not in NEEDED:
        return RopeConfig(rope_type=kind)  # which refuses it, and lists the others
    for key in ("rope_theta", "partial_rotary_factor"):
        default = fields.get(key)
        default = defaults.get(key) if default is None else default
        if default is not None:
            values.setdefault(key, default)
    _add_lengths(values, kind, fields, defaults)
    known = {"rope_type", "rope_theta", "partial_rotary_factor"}
    known |= {*NEEDED[kind], *OPTIONAL[kind]}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{name} has fields that are not modelled: {unknown}")
    return RopeConfig(**values)


def _add_lengths(
    values: dict[str, Any], kind: str, fields: Fields, defaults: Fields
) -> None:
    """Fills in the length at pre-training and the factor, where they are derived."""
    key, longest = "original_max_position_embeddings", "max_position_embeddings"
    if key not in NEEDED[kind]:
        return
    if kind == "dynamic":  # which transformers measures by the longest text alone
        values[key] = fields.get(longest)
        return
    beside = defaults.get(key)
    if beside is not None and values.get(key, beside) != beside:
        raise ValueError(
            f"{key} is {values[key]} in the rope and {beside} beside it, where this "
            "family reads it"
        )
    values.setdefault(key, beside if beside is not None else fields.get(longest))
    if "factor" not in values and fields.get(longest) and values[key]:
        values["factor"] = fields[longest] / values[key]


def _lengths(fields: Fields) -> dict[str, Any]:
    name = "max_position_embeddings"
    return {name: fields[name]} if name in fields else {}
