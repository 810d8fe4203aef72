"""Inputs in which layers of one kind differ: attention window and position tables."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig
from bridge.models._decoder_fields import COMPRESSIONS
from bridge.models._differential_attention import lambda_starts
from bridge.models._layer_kinds import LayerKind
from bridge.models._lightning import lightning_slopes
from bridge.models._position_tables import STEP, PositionTables
from bridge.models._positions import Ids
from bridge.models._query_scale_config import QueryScaleConfig
from bridge.models._rope import rope_tables
from bridge.models._rope_config import RopeConfig

# Window of a full-attention layer among sliding ones: wider than any sequence.
_NO_WINDOW = 2**30


class _PositionUse(NamedTuple):
    """What a layer makes of positions.

    Attributes:
      rope: Rotary embedding; None for none.
      scale: Factor of the queries; None for 1.
      is_chunked: Whether queries attend to their chunk alone.
    """

    rope: RopeConfig | None
    scale: QueryScaleConfig | None
    is_chunked: bool


def position_tables(
    config: DecoderConfig, positions: Ids, dtype: DTypeLike
) -> PositionTables:
    """Returns the tables of all positions, stacked if layers read different ones.

    Args:
      config: Config of the decoder.
      positions: Position of each token, [batch, seq].
      dtype: Dtype of the tables: the compute dtype.

    Returns:
      The tables; where layers differ with a leading dim, an index for each kind.

    Raises:
      ValueError: If rows are longer than ALiBi's positions are exact in `dtype`.
    """
    if config.full_attention is not None:
        return _tables_of_widths(config, positions, dtype)
    uses, steps = _distinct(config), None
    if config.alibi_bias_max is not None:
        steps = _two_summands(positions, dtype)
    made = [_tables_of(config, each, positions, dtype) for each in uses]
    if len(made) == 1:
        return made[0]._replace(steps=steps)
    stacks = (_stack(same) for same in zip(*made, strict=True))
    stacked = PositionTables(*stacks)  # pyright: ignore[reportArgumentType]
    return stacked._replace(steps=steps)


def check_exact(length: int, dtype: DTypeLike) -> None:
    """Raises a `ValueError` if rows are longer than ALiBi's positions are exact.

    Args:
      length: Tokens of a row.
      dtype: Dtype of the positions: the compute dtype.
    """
    info = jnp.finfo(dtype)
    exact = int(min(float(STEP << (info.nmant + 1)), float(info.max)))
    if length > exact:
        raise ValueError(
            f"ALiBi in {jnp.dtype(dtype).name}: {length:,} tokens a row, and positions "
            f"are exact up to {exact:,}. Compute in float32, or cut rows."
        )


def _two_summands(positions: Ids, dtype: DTypeLike) -> Float[Array, "batch seq 2"]:
    """Returns positions as a multiple of `STEP` and the rest, both exact in `dtype`."""
    check_exact(positions.shape[-1], dtype)
    steps = jnp.stack([positions // STEP * STEP, positions % STEP], axis=-1)
    return steps.astype(dtype)


def per_layer(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Returns the inputs that differ between layers, as arrays with a layer dim.

    Args:
      config: Config of the decoder.

    Returns:
      `table`, the index of each layer's tables, and `window`, its attention window in
      tokens; neither where all layers share one. `slopes`, the decays of lightning
      attention, where a layer has it. `lambda_start`, the factor of each layer by which
      one head of a pair subtracts from the other before training, where they do.
    """
    values, uses = {}, _distinct(config)
    if len(uses) > 1 and config.full_attention is None:
        indices = [uses.index(each) for each in _uses_of_layers(config)]
        values["table"] = np.asarray(indices, np.int32)
    if len(set(config.windows)) > 1:
        windows = [_NO_WINDOW if w is None else w for w in config.windows]
        values["window"] = np.asarray(windows, np.int32)
    if any(kind.mixer == "lightning" for kind in config.layer_kinds):
        values["slopes"] = lightning_slopes(config)
    if config.differential_attention:
        values["lambda_start"] = lambda_starts(config)
    return values


def _tables_of_widths(
    config: DecoderConfig, positions: Ids, dtype: DTypeLike
) -> PositionTables:
    """Returns the tables of sliding layers, and those of full ones."""
    made = []
    for kind in (LayerKind(), LayerKind(is_full=True)):
        own = config.of_kind(kind)
        assert own.rope is not None
        made.append(rope_tables(own.rope, own.rope_dim, positions, dtype))
    return PositionTables(*made[0], full=made[1])


def _tables_of(
    config: DecoderConfig, use: _PositionUse, positions: Ids, dtype: DTypeLike
) -> PositionTables:
    rope, scale, is_chunked = use
    cos = sin = factor = start = has_rope = None
    if rope is not None:
        cos, sin = rope_tables(rope, config.rope_dim, positions, dtype)
    elif config.rope is not None:
        # Rotation by 0, so that all layers of a scan have the same structure.
        cos = jnp.ones((*positions.shape, config.rope_dim // 2), dtype)
        sin = jnp.zeros_like(cos)
    if scale is not None:
        factor = _query_scale(scale, positions).astype(dtype)
    elif config.query_scale is not None:
        factor = jnp.ones(positions.shape, dtype)
    if (size := config.attention_chunk_size) is not None:
        start = positions // size * size if is_chunked else jnp.zeros_like(positions)
    if config.qk_norm == "l2":
        has_rope = jnp.asarray(rope is not None)
    return PositionTables(cos, sin, factor, start, has_rope)


def _query_scale(scale: QueryScaleConfig, positions: Ids) -> Float[Array, "batch seq"]:
    times = jnp.floor_divide(positions + scale.offset, scale.length)
    return 1 + scale.beta * jnp.log1p(times.astype(jnp.float32))


def _stack(tables: tuple[Array | None, ...]) -> Array | None:
    found = [table for table in tables if table is not None]
    return jnp.stack(found) if found else None


def _uses_of_layers(config: DecoderConfig) -> list[_PositionUse]:
    """Returns what each layer makes of positions."""
    sliding, found = config.sliding_rope or config.rope, []
    types = config.layer_types or ("full_attention",) * config.num_hidden_layers
    for layer, window in enumerate(config.windows):
        has_rope = layer not in config.no_rope_layers
        # Layers that slide and read entries have the rope of full-attention layers.
        slides = window is not None and types[layer] not in COMPRESSIONS
        rope = (sliding if slides else config.rope) if has_rope else None
        scale = config.query_scale
        if scale is not None and scale.no_rope_only and has_rope:
            scale = None
        found.append(_PositionUse(rope, scale, types[layer] == "chunked_attention"))
    return found


def _distinct(config: DecoderConfig) -> list[_PositionUse]:
    """Returns the distinct uses of all layers, in the order of their first use."""
    return list(dict.fromkeys(_uses_of_layers(config)))
