"""Ropes of files that say by how much queries grow with their position."""

from collections.abc import Mapping
from typing import Any

from bridge.families._field_transform import FieldTransform
from bridge.models import DecoderConfig, QueryScaleConfig, RopeConfig

ROPES = ("rope_scaling", "rope_parameters")
BETA = "llama_4_scaling_beta"


def rope_with_beta(base: FieldTransform, absent: Mapping[str, Any]) -> FieldTransform:
    """Reads a rope with `llama_4_scaling_beta`.

    Args:
      base: Reads the rope without that number.
      absent: The rope of a file that gives none, with the number.
    """

    def read(fields: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: fields[name] for name in ROPES if fields.get(name)}
        given = given or {"rope_parameters": absent}
        betas = [
            rope.get(BETA) if isinstance(rope, Mapping) else None
            for rope in given.values()
        ]
        wrong = [b for b in betas if not isinstance(b, float | int) or b != betas[0]]
        if wrong:
            raise ValueError(f"{BETA} = {wrong[0]!r}: a number, the same in each rope")
        plain = {
            name: {k: v for k, v in rope.items() if k != BETA}
            for name, rope in given.items()
        }
        values = base.read({**fields, **plain})
        return {**values, **_query_scale(float(betas[0] or 0), values["rope"])}

    def write(config: DecoderConfig) -> dict[str, Any]:
        written, scale = base.write(config), config.query_scale
        beta = 0.0 if scale is None else scale.beta
        ropes = {
            name: {**written[name], BETA: beta}
            for name in ROPES
            if written[name] is not None
        }
        return {**written, **ropes}

    return FieldTransform(base.names, read, write, base.defaults)


def _query_scale(beta: float, read: RopeConfig) -> dict[str, Any]:
    if not beta:
        return {}
    length = read.original_max_position_embeddings
    if length is None:
        raise ValueError(
            f"{BETA} = {beta}: the rope has no original_max_position_embeddings, "
            "after which queries grow"
        )
    return {"query_scale": QueryScaleConfig(beta, length)}
