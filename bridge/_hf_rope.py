"""Rotary embedding in Hugging Face config files: two spellings of one thing.

transformers 5 writes `rope_parameters`; up to 4 it was `rope_theta` and
`rope_scaling`, and a reader that knows one spelling takes the default for the other
in silence: a base of 10,000 where 500,000 was meant.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.models import RopeConfig
from bridge.models._config import ROPE_FIELDS

ROPE_NAMES = ("rope_theta", "rope_scaling", "rope_parameters")


def read_rope(fields: Mapping[str, Any]) -> RopeConfig:
    """Reads either spelling, or both if they agree.

    Args:
      fields: A whole config file.

    Raises:
      ValueError: If the spellings differ, or say what is not modelled.
    """
    given = {
        name: _read_spelling(name, fields[name], fields)
        for name in ("rope_scaling", "rope_parameters")
        if fields.get(name)
    }
    if len(set(given.values())) > 1:
        raise ValueError(f"rope_scaling and rope_parameters differ: {given}")
    return next(iter(given.values()), None) or _read_spelling("", {}, fields)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Writes both spellings, so that transformers 4 and 5 read the same."""
    extra = {name: getattr(rope, name) for name in ROPE_FIELDS[rope.rope_type]}
    scaling = {"rope_type": rope.rope_type, **extra}
    return {
        "rope_theta": rope.rope_theta,
        "rope_scaling": scaling if extra else None,
        "rope_parameters": {"rope_theta": rope.rope_theta, **scaling},
    }


def _read_spelling(
    name: str, spelling: Mapping[str, Any], fields: Mapping[str, Any]
) -> RopeConfig:
    if not isinstance(spelling, Mapping):
        raise ValueError(f"{name} = {spelling!r} is not an object")
    values = {key: value for key, value in spelling.items() if value is not None}
    legacy_type = values.pop("type", "default")
    values.setdefault("rope_type", legacy_type)
    values.setdefault("rope_theta", fields.get("rope_theta") or 10000.0)
    if values["rope_type"] == "llama3":
        length = fields.get("max_position_embeddings")
        values.setdefault("original_max_position_embeddings", length)
    unknown = sorted(set(values) - {f.name for f in dataclasses.fields(RopeConfig)})
    if unknown and values["rope_type"] in ROPE_FIELDS:
        raise ValueError(f"{name} has fields that are not modelled: {unknown}")
    return RopeConfig(
        **{key: value for key, value in values.items() if key not in unknown}
    )
