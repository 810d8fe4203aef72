"""Fields of DeepSeek-V4's config files that are not one to one with ours."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.families._field_transform import FieldTransform
from bridge.families._hf_rope import read_rope, write_rope
from bridge.models import DecoderConfig, RopeConfig

Fields = Mapping[str, Any]

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_TYPES, _RATIOS = "layer_types", "compress_ratios"
_BY_RATIO = {0: "sliding_attention", 4: _SPARSE, 128: _HEAVY}


def _default_types(layers: int) -> tuple[str, ...]:
    behind = tuple(_SPARSE if i % 2 else _HEAVY for i in range(max(layers - 2, 0)))
    return (_HEAVY,) * min(layers, 2) + behind


def _types_of_ratios(ratios: Any, layers: int) -> tuple[str, ...]:
    """Returns the types of the layers; what is behind them is of further tokens."""
    if set(ratios) - set(_BY_RATIO) or len(ratios) < layers:
        raise ValueError(
            f"{_RATIOS} = {ratios!r}: one of {sorted(_BY_RATIO)} for each of the "
            f"{layers} layers"
        )
    return tuple(_BY_RATIO[ratio] for ratio in ratios[:layers])


def _read_types(fields: Fields) -> dict[str, Any]:
    layers, given, ratios = fields["num_hidden_layers"], fields[_TYPES], fields[_RATIOS]
    found = None if given is None else tuple(given[:layers])
    if ratios is not None:
        of_ratios = _types_of_ratios(ratios, layers)
        if found not in (None, of_ratios):
            raise ValueError(
                f"{_TYPES} = {given!r}, but {_RATIOS} say {list(of_ratios)}"
            )
        found = of_ratios
    found = _default_types(layers) if found is None else found
    if unknown := sorted({str(kind) for kind in found} - set(_BY_RATIO.values())):
        raise ValueError(
            f"{_TYPES} has {unknown}: known are {sorted(_BY_RATIO.values())}"
        )
    return {_TYPES: found}


LAYER_TYPES = FieldTransform(
    (_TYPES, _RATIOS),
    _read_types,
    lambda config: {_TYPES: config.layer_types},
    {_TYPES: None, _RATIOS: None},
)
"""The type of each layer, or the number of tokens of its entries; 0 for none."""

_MLP_TYPES, _NUM_HASHED = "mlp_layer_types", "num_hash_layers"
_HASHED, _ROUTED = "hash_moe", "moe"


def _read_hashed(fields: Fields) -> dict[str, Any]:
    layers, given, count = (
        fields[name] for name in ("num_hidden_layers", _MLP_TYPES, _NUM_HASHED)
    )
    if given is None:
        return {"hash_layers": tuple(range(min(layers, 3 if count is None else count)))}
    if len(given) < layers or set(given) - {_HASHED, _ROUTED}:
        raise ValueError(
            f"{_MLP_TYPES} = {given!r}: {_HASHED!r} or {_ROUTED!r} for each of the "
            f"{layers} layers"
        )
    hashed = tuple(i for i, kind in enumerate(given[:layers]) if kind == _HASHED)
    if count is not None and hashed != tuple(range(min(layers, count))):
        raise ValueError(f"{_MLP_TYPES} = {given!r}, but {_NUM_HASHED} = {count!r}")
    return {"hash_layers": hashed}


def _write_hashed(config: DecoderConfig) -> dict[str, Any]:
    layers, hashed = range(config.num_hidden_layers), config.hash_layers
    return {_MLP_TYPES: [_HASHED if i in hashed else _ROUTED for i in layers]}


HASH_LAYERS = FieldTransform(
    (_MLP_TYPES, _NUM_HASHED),
    _read_hashed,
    _write_hashed,
    {_MLP_TYPES: None, _NUM_HASHED: None},
)
"""Which layers have experts that follow from the token, by type or by number."""

_RATES = "compress_rates"
_PARTS = {_SPARSE: "sparse_rate", _HEAVY: "heavy_rate"}
_OLD_RATES = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
_DEFAULT_RATES = {_SPARSE: 4, _HEAVY: 128}


def _read_rates(fields: Fields) -> dict[str, Any]:
    given = fields[_RATES]
    given = _DEFAULT_RATES if given is None else given
    if not isinstance(given, Mapping) or set(given) != set(_PARTS):
        raise ValueError(f"{_RATES} = {given!r}: a rate for each of {sorted(_PARTS)}")
    rates = {
        kind: given[kind] if fields[old] is None else fields[old]
        for kind, old in _OLD_RATES.items()
    }
    return {f"compressed_attention.{_PARTS[kind]}": v for kind, v in rates.items()}


def _write_rates(config: DecoderConfig) -> dict[str, Any]:
    sizes = config.compressed_attention
    assert sizes is not None
    return {_RATES: {kind: getattr(sizes, ours) for kind, ours in _PARTS.items()}}


RATES = FieldTransform(
    (_RATES, *_OLD_RATES.values()),
    _read_rates,
    _write_rates,
    dict.fromkeys((_RATES, *_OLD_RATES.values())),
)
"""The number of tokens from one entry to the next, by the type of a layer."""

_MAIN, _COMPRESS = "main", "compress"
_PARTIAL, _ROTATED = "partial_rotary_factor", "qk_rope_head_dim"
_ROPE_DEFAULTS = {
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    _PARTIAL: None,
    _ROTATED: None,
}
_DEFAULT_PARTIAL = 64 / 512


def _read_ropes(fields: Fields) -> dict[str, Any]:
    parameters, scaling = fields["rope_parameters"] or {}, fields["rope_scaling"] or {}
    kinds = (_MAIN, _COMPRESS)
    nested = [r for k in kinds if isinstance(r := parameters.get(k), Mapping)]
    if len(nested) == len(kinds):
        if scaling:
            raise ValueError(
                f"rope_scaling = {scaling!r} beside rope_parameters of {_MAIN} and "
                f"{_COMPRESS}: transformers reads one of them; remove rope_scaling"
            )
    else:
        nested = _flat_ropes(fields, parameters, scaling)
    ropes = [_read_one(fields, rope) for rope in nested]
    wrong = [
        f"truncate = False of the rope {kind}: transformers does not read it in a "
        "family of two ropes; remove it"
        for kind, rope in zip(kinds, ropes, strict=True)
        if rope.truncate is False
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    return {"sliding_rope": ropes[0], "rope": ropes[1]}


def _read_one(fields: Fields, rope: Fields) -> RopeConfig:
    lengths = {"max_position_embeddings": fields.get("max_position_embeddings")}
    made = read_rope({"rope_parameters": rope, **lengths})
    return dataclasses.replace(made, interleaved=True)


def _flat_ropes(fields: Fields, parameters: Fields, scaling: Fields) -> list[Fields]:
    """Returns both ropes of a file with one scaling, which the second has."""
    if parameters and scaling and dict(parameters) != dict(scaling):
        raise ValueError(f"rope_scaling {scaling!r} and rope_parameters differ")
    given = dict(parameters or scaling)
    partial = _partial(fields)
    main = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
    main[_PARTIAL] = partial
    wrong = [
        f"{name} = {given[name]!r} of a rope: {main[name]!r} beside it is read"
        for name in ("rope_theta", _PARTIAL)
        if given.get(name) not in (None, main[name])
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    given |= {"rope_theta": fields["compress_rope_theta"], _PARTIAL: partial}
    if given.get("rope_type", given.get("type")) == "yarn":
        given.setdefault("attention_factor", 1.0)
    return [main, given]


def _partial(fields: Fields) -> float:
    """Returns the part of a head that is rotated, by a factor or a number of dims."""
    factor, dims, width = fields[_PARTIAL], fields[_ROTATED], fields["head_dim"]
    if factor is None:
        return _DEFAULT_PARTIAL if dims is None else dims / width
    if dims not in (None, int(width * factor)):
        raise ValueError(
            f"{_ROTATED} = {dims!r}: {_PARTIAL} {factor} of head_dim {width} is "
            f"{int(width * factor)}"
        )
    return factor


def _write_ropes(config: DecoderConfig) -> dict[str, Any]:
    assert config.rope is not None
    partial = config.rope.partial_rotary_factor
    ropes = {_MAIN: config.sliding_rope or config.rope, _COMPRESS: config.rope}
    parameters = {
        kind: {**write_rope(rope)["rope_parameters"], _PARTIAL: partial}
        for kind, rope in ropes.items()
    }
    return {
        "rope_parameters": parameters,
        "rope_theta": ropes[_MAIN].rope_theta,
        "compress_rope_theta": config.rope.rope_theta,
        _PARTIAL: partial,
        _ROTATED: config.rope_dim,
    }


ROPES = FieldTransform(tuple(_ROPE_DEFAULTS), _read_ropes, _write_ropes, _ROPE_DEFAULTS)
"""The rope of layers that only slide, and that of layers with entries.

Where a file gives both, what is beside them is not read, as in transformers.
"""
