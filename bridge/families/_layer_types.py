"""Which layers slide, which have no rope, which are dense, in the formats of files."""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families._field_transform import FieldTransform
from bridge.models import DecoderConfig
from bridge.models._decoder_fields import LayerType

FULL, SLIDING = "full_attention", "sliding_attention"
_PATTERN = "sliding_window_pattern"
Fields = Mapping[str, Any]


def layer_types(every: int, pattern_field: str | None = None) -> FieldTransform:
    """Reads the type of each layer; by default every so many are full, others slide.

    Args:
      every: The default.
      pattern_field: An old field of the file that overrides it.
    """
    defaults = {
        "layer_types": None,
        **({pattern_field: every} if pattern_field else {}),
    }

    def read(fields: Fields) -> dict[str, Any]:
        given = fields["layer_types"]
        if given is None:
            period = interval(fields, pattern_field) if pattern_field else every
            given = [
                SLIDING if (layer + 1) % period else FULL
                for layer in range(fields["num_hidden_layers"])
            ]
        return {"layer_types": tuple(given)}

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {"layer_types": config.layer_types}

    return FieldTransform(tuple(defaults), read, write, defaults)


def turned_where_sliding(
    every: int, window: int = 4096, pattern_field: str | None = _PATTERN
) -> FieldTransform:
    """Reads the type of each layer, where full layers have no rope.

    Args:
      every: Every so many layers are full, others slide, where the file says neither
        `layer_types` nor the pattern.
      window: What transformers takes for `sliding_window` where the file does not say.
      pattern_field: The field of that pattern; None if the family has none.
    """
    defaults = {"sliding_window": window, "layer_types": None}
    types = layer_types(every, pattern_field)

    def read(fields: Fields) -> dict[str, Any]:
        window = fields["sliding_window"]
        if window is None and fields["layer_types"] is None:
            raise ValueError("sliding_window = None needs layer_types")
        given = types.read(fields)["layer_types"]
        full = tuple(i for i, kind in enumerate(given) if kind == FULL)
        return {
            "sliding_window": window,
            "layer_types": given,
            "no_rope_layers": () if window is None else full,
        }

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {
            "sliding_window": config.sliding_window,
            "layer_types": config.layer_types,
        }

    return FieldTransform(
        (*defaults, *([pattern_field] if pattern_field else [])),
        read,
        write,
        {**defaults, **types.defaults},
    )


def window_of_all(default: int | None = None) -> FieldTransform:
    """Reads a window that all layers have."""
    name = "sliding_window"

    def read(fields: Fields) -> dict[str, Any]:
        return {name: fields[name]}

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {name: config.sliding_window}

    return FieldTransform((name,), read, write, {name: default})


def switched_window(
    slides: Callable[[int, Fields], bool] | None, default: int | None = 4096
) -> FieldTransform:
    """Reads a window that is off unless `use_sliding_window` turns it on.

    Args:
      slides: Whether a layer slides by default, where it is on; None means that all
        do, and that the file has no `layer_types`.
      default: What transformers takes for a window that the file does not give.
    """
    defaults = {"use_sliding_window": False, "sliding_window": default}
    defaults |= {} if slides is None else {"layer_types": None}

    def read(fields: Fields) -> dict[str, Any]:
        window, given = fields["sliding_window"], fields.get("layer_types")
        if not fields["use_sliding_window"] or window is None:
            _check_all_full(given, fields["num_hidden_layers"])
            return {"sliding_window": None, "layer_types": None}
        if slides is None:
            return {"sliding_window": window, "layer_types": None}
        if given is None:
            given = [
                SLIDING if slides(layer, fields) else FULL
                for layer in range(fields["num_hidden_layers"])
            ]
        return {"sliding_window": window, "layer_types": tuple(given)}

    def write(config: DecoderConfig) -> dict[str, Any]:
        written = {
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
        }
        if slides is not None:
            all_full = (FULL,) * config.num_hidden_layers
            written["layer_types"] = config.layer_types or all_full
        return written

    return FieldTransform(tuple(defaults), read, write, defaults)


def window_from(name: str, default: int) -> FieldTransform:
    """Reads a window that layers have from the one on that a field counts.

    Args:
      name: The field, where the file has no `layer_types`.
      default: What transformers takes for it where the file does not say.
    """
    defaults = {"sliding_window": 4096, "layer_types": None, name: default}

    def read(fields: Fields) -> dict[str, Any]:
        window, given = fields["sliding_window"], fields["layer_types"]
        layers = range(fields["num_hidden_layers"])
        if given is None:
            slides = [window is not None and i >= fields[name] for i in layers]
            given = [SLIDING if slide else FULL for slide in slides]
        return {"sliding_window": window, "layer_types": tuple(given)}

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {
            "sliding_window": config.sliding_window,
            "layer_types": config.layer_types,
        }

    return FieldTransform(tuple(defaults), read, write, defaults)


def mixer_types(
    names: Mapping[str, LayerType],
    absent: Callable[[Fields], list[str]],
    others: Mapping[str, Any] | None = None,
) -> FieldTransform:
    """Reads what mixes the tokens of each layer: attention, or something else.

    Args:
      names: Our types by those of the file; attention has the same name in both.
      absent: Types of the file's layers where it has no `layer_types`.
      others: Fields that `absent` reads, with their defaults.
    """
    ours = {FULL: FULL, **names}
    # The first of several names of a type is what is written.
    theirs = {type_: name for name, type_ in reversed(ours.items())}
    defaults = {"layer_types": None, **(others or {})}

    def read(fields: Fields) -> dict[str, Any]:
        given = fields["layer_types"]
        given = absent(fields) if given is None else given
        if unknown := sorted({str(kind) for kind in given} - set(ours)):
            raise ValueError(f"layer_types has {unknown}: known are {sorted(ours)}")
        return {"layer_types": tuple(ours[kind] for kind in given)}

    def write(config: DecoderConfig) -> dict[str, Any]:
        types = config.layer_types or (FULL,) * config.num_hidden_layers
        return {"layer_types": tuple(theirs[kind] for kind in types)}

    return FieldTransform(tuple(defaults), read, write, defaults)


def sliding_or_full(
    absent: Callable[[Fields], list[str]], others: Mapping[str, Any] | None = None
) -> FieldTransform:
    """Reads the type of each layer, which slides or attends to all.

    Args:
      absent: Types of the layers where the file has no `layer_types`.
      others: Fields that `absent` reads, with their defaults.
    """
    return mixer_types({SLIDING: SLIDING}, absent, others)


def sliding_or_full_without_rope(
    absent: Callable[[Fields], list[str]], others: Mapping[str, Any] | None = None
) -> FieldTransform:
    """Reads the type of each layer, where those that attend to all have no rope.

    Args:
      absent: As for `sliding_or_full`.
      others: As for `sliding_or_full`.
    """
    base = sliding_or_full(absent, others)

    def read(fields: Fields) -> dict[str, Any]:
        types = base.read(fields)["layer_types"]
        full = tuple(i for i, kind in enumerate(types) if kind == FULL)
        return {"layer_types": types, "no_rope_layers": full}

    return FieldTransform(base.names, read, base.write, base.defaults)


def first_of_four_full(fields: Fields) -> list[str]:
    """Returns types of layers of which every fourth, from the first on, is full."""
    return [SLIDING if i % 4 else FULL for i in range(fields["num_hidden_layers"])]


def _check_all_full(layer_types: Any, layers: int) -> None:
    if layer_types is None:
        return
    if SLIDING in layer_types:
        raise ValueError("layer_types slide, but use_sliding_window is off")
    if list(layer_types) != [FULL] * layers:
        raise ValueError(
            f"layer_types = {layer_types!r}: only {layers} of {FULL!r} are modelled "
            "where no layer slides"
        )


def interval(fields: Fields, name: str) -> int:
    """Reads a number of layers after which something comes again.

    Args:
      fields: Fields of the file.
      name: The field.

    Raises:
      ValueError: If it is not a positive integer.
    """
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} = {value!r}: must be a positive integer")
    return value


def _no_rope_layers() -> FieldTransform:
    name, every = "no_rope_layers", "no_rope_layer_interval"

    def read(fields: Fields) -> dict[str, Any]:
        count, has_rope = fields["num_hidden_layers"], fields[name]
        if has_rope is None:
            period = interval(fields, every)
            has_rope = [int((layer + 1) % period != 0) for layer in range(count)]
        if len(has_rope) != count:
            raise ValueError(f"{name} has {len(has_rope)} entries for {count} layers")
        return {name: tuple(i for i, has in enumerate(has_rope) if not has)}

    def write(config: DecoderConfig) -> dict[str, Any]:
        layers = range(config.num_hidden_layers)
        return {name: [int(i not in config.no_rope_layers) for i in layers]}

    return FieldTransform((name, every), read, write, {name: None, every: 4})


NO_ROPE_LAYERS = _no_rope_layers()
"""`no_rope_layers` of a file has a 1 for each layer that has a rope."""


def first_dense(default: int, name: str = "first_k_dense_replace") -> FieldTransform:
    """Reads how many of the first layers are dense.

    Args:
      default: What transformers takes where the file does not say.
      name: The field.
    """

    def read(fields: Fields) -> dict[str, Any]:
        count = min(fields[name], fields["num_hidden_layers"])
        return {"dense_layers": tuple(range(count))}

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {name: len(config.dense_layers)}

    return FieldTransform((name,), read, write, {name: default})


def first_dense_or_by_type(default: int) -> FieldTransform:
    """Reads the type of each MLP, or how many of the first layers are dense.

    Args:
      default: What transformers takes for the latter where the file says neither.
    """
    name, count = "mlp_layer_types", "first_k_dense_replace"
    of_first, by_type = first_dense(default), _dense_by_type()

    def read(fields: Fields) -> dict[str, Any]:
        return (of_first if fields[name] is None else by_type).read(fields)

    def write(config: DecoderConfig) -> dict[str, Any]:
        return by_type.write(config) | of_first.write(config)

    return FieldTransform((name, count), read, write, {name: None, count: default})


def _dense_by_type(default: tuple[int, ...] = (0,)) -> FieldTransform:
    name, dense, sparse = "mlp_layer_types", "dense", "sparse"

    def read(fields: Fields) -> dict[str, Any]:
        count, given = fields["num_hidden_layers"], fields[name]
        if given is None:
            return {"dense_layers": default}
        if len(given) != count or set(given) - {dense, sparse}:
            raise ValueError(
                f"{name} = {given!r}: {dense!r} or {sparse!r} for each of the {count} "
                "layers"
            )
        return {"dense_layers": tuple(i for i, k in enumerate(given) if k == dense)}

    def write(config: DecoderConfig) -> dict[str, Any]:
        layers = range(config.num_hidden_layers)
        return {name: [dense if i in config.dense_layers else sparse for i in layers]}

    return FieldTransform((name,), read, write, {name: None})


DENSE_BY_TYPE = _dense_by_type()
"""Each layer is said to be dense or sparse; by default the first alone is dense."""

SPARSE_BY_TYPE = _dense_by_type(())
"""The same, where all layers are sparse by default."""


def dense_by_step(default: tuple[int, ...] = ()) -> FieldTransform:
    """Reads after how many layers one is sparse, and which are dense nevertheless.

    Args:
      default: Layers that are dense where the file lists none.
    """
    step, listed = "decoder_sparse_step", "mlp_only_layers"

    def read(fields: Fields) -> dict[str, Any]:
        period, given = interval(fields, step), fields[listed]
        dense = default if given is None else given
        return {
            "dense_layers": tuple(
                layer
                for layer in range(fields["num_hidden_layers"])
                if layer in dense or (layer + 1) % period
            )
        }

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {step: 1, listed: config.dense_layers}

    return FieldTransform((step, listed), read, write, {step: 1, listed: None})


DENSE_BY_STEP = dense_by_step()
"""Every so many layers are sparse, but for those that are listed."""
