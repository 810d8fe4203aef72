"""Inputs in which layers of one kind differ: attention window and rotary table."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from bridge.models._config import DecoderConfig
from bridge.models._decoder_layer import Tables
from bridge.models._positions import Ids
from bridge.models._rope import rope_tables
from bridge.models._rope_config import RopeConfig

# Window of a full-attention layer among sliding ones: wider than any sequence.
_NO_WINDOW = 2**30


def rotary_tables(config: DecoderConfig, positions: Ids, dtype: DTypeLike) -> Tables:
    """Returns cosines and sines of all positions.

    Args:
      config: Config of the decoder.
      positions: Position of each token.
      dtype: Dtype of the tables: the compute dtype.

    Returns:
      Tables, stacked along a first dim if layers have different rotary embeddings;
      None if no layer has one.
    """
    ropes = _ropes(config)
    if not ropes:
        return None
    tables = []
    for rope in ropes:
        if rope is None:
            # Rotation by 0, so that all layers of a scan have the same structure.
            ones = jnp.ones((*positions.shape, config.rope_dim // 2), dtype)
            tables.append((ones, jnp.zeros_like(ones)))
        else:
            tables.append(rope_tables(rope, config.rope_dim, positions, dtype))
    if len(tables) == 1:
        return tables[0]
    cosines, sines = zip(*tables, strict=True)
    return jnp.stack(cosines), jnp.stack(sines)


def per_layer(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Returns the inputs that differ between layers, as arrays with a layer dim.

    Args:
      config: Config of the decoder.

    Returns:
      `table`, the index of each layer's rotary table, and `window`, its attention
      window in tokens; neither where all layers share one.
    """
    values, ropes = {}, _ropes(config)
    if len(ropes) > 1:
        indices = [ropes.index(rope) for rope in _layer_ropes(config)]
        values["table"] = np.asarray(indices, np.int32)
    if len(set(config.windows)) > 1:
        windows = [_NO_WINDOW if w is None else w for w in config.windows]
        values["window"] = np.asarray(windows, np.int32)
    return values


def _layer_ropes(config: DecoderConfig) -> list[RopeConfig | None]:
    """Returns the rotary embedding of each layer, None for layers without one."""
    sliding = config.sliding_rope or config.rope
    return [
        None
        if layer in config.no_rope_layers
        else (config.rope if window is None else sliding)
        for layer, window in enumerate(config.windows)
    ]


def _ropes(config: DecoderConfig) -> list[RopeConfig | None]:
    """Returns the distinct rotary embeddings, in the order of their first use."""
    if config.rope is None:
        return []
    return list(dict.fromkeys(_layer_ropes(config)))
