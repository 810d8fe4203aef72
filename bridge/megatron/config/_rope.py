"""Transforms of `TransformerConfig` and `GPTModel` fields for position embeddings.

Grouped-query attention uses `position_embedding_type` with `yarn_` fields; latent
attention uses `rope_type` with fields of the same meaning under other names.

Source: Megatron-LM megatron/core/models/common/embeddings/rotary_pos_embedding.py,
yarn_rotary_pos_embedding.py, megatron/core/transformer/multi_latent_attention.py
"""

from typing import Any

from bridge.families._field_transform import FieldTransform
from bridge.megatron.config._refusal import Fields, refuse
from bridge.models import DecoderConfig, RopeConfig

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Constants in Megatron's code; only the factor has a field."""

_YARN = {
    "rotary_scaling_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""Latent attention's fields; grouped-query attention prefixes them with `yarn_`."""

_ROUNDED = "yarn_correction_range_round_to_int"
_TURNS = {"beta_fast": 32.0, "beta_slow": 1.0}


def _read_positions(fields: Fields) -> dict[str, Any]:
    if fields["multi_latent_attention"]:
        return {"rope": _read_latent(fields)}
    kind = fields["position_embedding_type"]
    if kind == "learned_absolute":
        return {"rope": None}
    if kind not in ("rope", "yarn"):
        raise ValueError(
            f"position_embedding_type = {kind!r}: only rope, yarn and learned_absolute "
            "are modelled"
        )
    stretched = _read_yarn(fields) if kind == "yarn" else _read_stretch(fields)
    return {
        "rope": RopeConfig(
            rope_theta=fields["rotary_base"],
            partial_rotary_factor=fields["rotary_percent"],
            interleaved=fields["rotary_interleaved"],
            **stretched,
        ),
        "no_rope_layers": _read_skipped(fields),
    }


def _read_skipped(fields: Fields) -> tuple[int, ...]:
    pattern, layers = fields["no_rope_freq"], range(fields["num_layers"])
    if isinstance(pattern, int):
        return tuple(i for i in layers if pattern and (i + 1) % pattern == 0)
    return tuple(i for i, skips in enumerate(pattern or ()) if skips)


def _read_stretch(fields: Fields) -> dict[str, Any]:
    linear = fields["seq_len_interpolation_factor"]
    if fields["rope_scaling"] and linear is not None:
        raise ValueError("seq_len_interpolation_factor and rope_scaling, both")
    if fields["rope_scaling"]:
        factor = fields["rope_scaling_factor"]
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return {} if linear is None else {"rope_type": "linear", "factor": linear}


def _read_yarn(fields: Fields) -> dict[str, Any]:
    values = {ours: fields[f"yarn_{theirs}"] for theirs, ours in _YARN.items()}
    refuse(
        [
            f"yarn_{name} is missing"
            for name in ("rotary_scaling_factor", "original_max_position_embeddings")
            if fields[f"yarn_{name}"] is None
        ]
        + [
            f"yarn_{name} = 0: it takes this at its word, transformers as not given"
            for name in ("mscale", "mscale_all_dim")
            if fields[f"yarn_{name}"] == 0
        ]
    )
    rounded = fields[_ROUNDED] is not False
    return {"rope_type": "yarn", **values} | ({} if rounded else {"truncate": False})


def _read_latent(fields: Fields) -> RopeConfig:
    theta, kind = fields["rotary_base"], fields["rope_type"]
    wrong = []
    if fields["position_embedding_type"] == "learned_absolute":
        wrong.append("position_embedding_type = 'learned_absolute': added to a rope")
    if fields["rotary_percent"] != 1:
        wrong.append(f"rotary_percent = {fields['rotary_percent']}: latent heads turn")
    if fields["rotary_interleaved"]:
        wrong.append("rotary_interleaved = True: latent attention's pairs always are")
    if kind not in ("rope", "yarn"):
        wrong.append(f"rope_type = {kind!r}: only rope and yarn are modelled")
    factor, of_all = fields["rotary_scaling_factor"], fields["mscale_all_dim"]
    if kind == "rope" and factor > 1 and of_all:
        wrong.append(f"mscale_all_dim = {of_all}: scales the scores of plain rope")
    if kind == "yarn" and not (fields["mscale"] if of_all else fields["mscale"] == 1):
        wrong.append(f"mscale = {fields['mscale']} with mscale_all_dim = {of_all}")
    refuse(wrong)
    if kind == "rope":
        return RopeConfig(theta, interleaved=True)
    values: dict[str, Any] = {ours: fields[theirs] for theirs, ours in _YARN.items()}
    if not of_all:  # equivalent in transformers: neither value is given
        values |= {"mscale": None, "mscale_all_dim": None}
    return RopeConfig(theta, "yarn", interleaved=True, **values)


def _write_positions(config: DecoderConfig) -> dict[str, Any]:
    rope = config.rope
    if rope is not None and rope.clockwise:
        raise ValueError("rope.clockwise = True: its ropes turn the other way")
    if config.mla is not None:
        assert rope is not None
        return _write_latent(rope)
    if rope is None and not config.learned_positions:
        raise ValueError("rope = None without learned positions: it has either")
    if rope is None:
        return {"position_embedding_type": "learned_absolute"}
    skipped = [int(i in config.no_rope_layers) for i in range(config.num_hidden_layers)]
    written = {
        "position_embedding_type": "yarn" if rope.rope_type == "yarn" else "rope",
        "rotary_base": rope.rope_theta,
        "rotary_percent": rope.partial_rotary_factor,
        "rotary_interleaved": rope.interleaved,
        "no_rope_freq": skipped if any(skipped) else None,
        "seq_len_interpolation_factor": None,
        "rope_scaling": rope.rope_type == "llama3",
    }
    if rope.rope_type == "linear":
        written["seq_len_interpolation_factor"] = rope.factor
    return written | _STRETCHES[rope.rope_type](rope)


def _write_llama3(rope: RopeConfig) -> dict[str, Any]:
    refuse(
        [
            f"rope.{name} = {getattr(rope, name)}: a constant of its code, {value}"
            for name, value in _LLAMA3.items()
            if getattr(rope, name) != value
        ]
    )
    return {"rope_scaling_factor": rope.factor}


def _write_yarn(rope: RopeConfig) -> dict[str, Any]:
    _refuse_attention_factor(rope)
    written = {f"yarn_{name}": value for name, value in _yarn_values(rope).items()}
    for name in ("mscale", "mscale_all_dim"):
        written[f"yarn_{name}"] = getattr(rope, name) or None
    return {**written, _ROUNDED: rope.truncate is not False}


def _refuse_type(rope: RopeConfig) -> dict[str, Any]:
    raise ValueError(f"rope_type = {rope.rope_type!r}: it has no such rope")


_STRETCHES = {
    "default": lambda rope: {},
    "linear": lambda rope: {},
    "llama3": _write_llama3,
    "yarn": _write_yarn,
    **dict.fromkeys(("dynamic", "ntk_alpha", "longrope"), _refuse_type),
}


def _write_latent(rope: RopeConfig) -> dict[str, Any]:
    wrong = []
    if rope.rope_type not in ("default", "yarn"):
        wrong.append(
            f"rope_type = {rope.rope_type!r}: its latent rope is plain or yarn"
        )
    if not rope.interleaved or rope.partial_rotary_factor != 1:
        wrong.append(
            f"rope.interleaved = {rope.interleaved}, rope.partial_rotary_factor = "
            f"{rope.partial_rotary_factor}: latent attention needs True and 1"
        )
    if rope.truncate is False:
        wrong.append("rope.truncate = False: latent attention's yarn rounds")
    if bool(rope.mscale) != bool(rope.mscale_all_dim):
        wrong.append("rope.mscale and mscale_all_dim: both or none")
    refuse(wrong)
    written: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": rope.rope_theta,
        "rotary_percent": 1.0,
        "rope_type": "yarn" if rope.rope_type == "yarn" else "rope",
        # Override Megatron's default of 40, which is DeepSeek's yarn factor.
        "rotary_scaling_factor": 1.0,
        "mscale": rope.mscale or 1.0,
        "mscale_all_dim": rope.mscale_all_dim or 0.0,
    }
    if rope.rope_type == "yarn":
        _refuse_attention_factor(rope)
        written |= _yarn_values(rope)
    return written


def _yarn_values(rope: RopeConfig) -> dict[str, Any]:
    length = "original_max_position_embeddings"
    turns = {
        name: default if (value := getattr(rope, name)) is None else value
        for name, default in _TURNS.items()
    }
    written = {"rotary_scaling_factor": rope.factor, length: getattr(rope, length)}
    return written | turns


def _refuse_attention_factor(rope: RopeConfig) -> None:
    if rope.attention_factor is not None:
        raise ValueError(
            f"rope.attention_factor = {rope.attention_factor}: it follows from the "
            "factor and mscale"
        )


LATENT_ROPE = ("rope_type", *_YARN)
ROPE_CODEC = FieldTransform(
    (
        *("position_embedding_type", "rotary_base", "rotary_percent", "no_rope_freq"),
        *("rotary_interleaved", "seq_len_interpolation_factor", "rope_scaling"),
        *("rope_scaling_factor", *LATENT_ROPE, _ROUNDED),
        *(f"yarn_{name}" for name in _YARN),
    ),
    _read_positions,
    _write_positions,
)
