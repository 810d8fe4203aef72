"""Which layers slide, which do not turn, which are dense: said in many ways."""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families._codec import Codec
from bridge.models import DecoderConfig

FULL, SLIDING = "full_attention", "sliding_attention"
Fields = Mapping[str, Any]


def layer_types(every: int, pattern_field: str | None = None) -> Codec:
    """Reads the type of each layer; by default every so many are full, others slide.

    Args:
      every: The default.
      pattern_field: An old field of the file that overrides it.
    """
    names = ("layer_types", *([pattern_field] if pattern_field else []))

    def read(fields: Fields) -> dict[str, Any]:
        period = (fields.get(pattern_field) if pattern_field else None) or every
        default = [
            SLIDING if (layer + 1) % period else FULL
            for layer in range(fields["num_hidden_layers"])
        ]
        return {"layer_types": tuple(fields.get("layer_types") or default)}

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {"layer_types": config.layer_types}

    return Codec(names, read, write)


def window_of_all(default: int | None = None) -> Codec:
    """Reads a window that all layers have."""

    def read(fields: Fields) -> dict[str, Any]:
        return {"sliding_window": fields.get("sliding_window", default)}

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {"sliding_window": config.sliding_window}

    return Codec(("sliding_window",), read, write)


def switched_window(
    slides: Callable[[int, Fields], bool] | None, default: int | None = 4096
) -> Codec:
    """Reads a window that is off unless `use_sliding_window` turns it on.

    Args:
      slides: Whether a layer slides by default, where it is on; None means that all
        do, and that the file has no `layer_types`.
      default: What transformers takes for a window that the file does not give.
    """
    names = ("use_sliding_window", "sliding_window")

    def read(fields: Fields) -> dict[str, Any]:
        window = fields.get("sliding_window", default)
        given = fields.get("layer_types")
        if not fields.get("use_sliding_window") or window is None:
            if SLIDING in (given or ()):
                raise ValueError("layer_types slide, but use_sliding_window is off")
            return {"sliding_window": None, "layer_types": None}
        if slides is None:
            return {"sliding_window": window, "layer_types": None}
        by_default = [
            SLIDING if slides(layer, fields) else FULL
            for layer in range(fields["num_hidden_layers"])
        ]
        return {"sliding_window": window, "layer_types": tuple(given or by_default)}

    def write(config: DecoderConfig) -> dict[str, Any]:
        written = {
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
        }
        if slides is not None:
            all_full = (FULL,) * config.num_hidden_layers
            written["layer_types"] = config.layer_types or all_full
        return written

    return Codec(names if slides is None else (*names, "layer_types"), read, write)


def _no_rope_layers() -> Codec:
    name, interval = "no_rope_layers", "no_rope_layer_interval"

    def read(fields: Fields) -> dict[str, Any]:
        count, period = fields["num_hidden_layers"], fields.get(interval, 4)
        turned = fields.get(name) or [
            int((layer + 1) % period != 0) for layer in range(count)
        ]
        if len(turned) != count:
            raise ValueError(f"{name} has {len(turned)} entries for {count} layers")
        return {name: tuple(i for i, turns in enumerate(turned) if not turns)}

    def write(config: DecoderConfig) -> dict[str, Any]:
        layers = range(config.num_hidden_layers)
        return {name: [int(i not in config.no_rope_layers) for i in layers]}

    return Codec((name, interval), read, write)


NO_ROPE_LAYERS = _no_rope_layers()
"""`no_rope_layers` of a file has a 1 for each layer that does turn."""


def _first_dense() -> Codec:
    name = "first_k_dense_replace"

    def read(fields: Fields) -> dict[str, Any]:
        count = min(fields.get(name) or 0, fields["num_hidden_layers"])
        return {"dense_layers": tuple(range(count))}

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {name: len(config.dense_layers)}

    return Codec((name,), read, write)


FIRST_DENSE = _first_dense()
"""The first so many layers are dense."""


def _dense_by_step() -> Codec:
    step, listed = "decoder_sparse_step", "mlp_only_layers"

    def read(fields: Fields) -> dict[str, Any]:
        period, dense = fields.get(step, 1), fields.get(listed) or ()
        return {
            "dense_layers": tuple(
                layer
                for layer in range(fields["num_hidden_layers"])
                if layer in dense or (layer + 1) % period
            )
        }

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {step: 1, listed: config.dense_layers}

    return Codec((step, listed), read, write)


DENSE_BY_STEP = _dense_by_step()
"""Every so many layers are sparse, but for those that are listed."""
