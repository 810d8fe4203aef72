"""KV cache, and attention that reads it."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from bridge.models._attention import Window, attend
from bridge.models._config import DecoderConfig

Slots = Int[Array, "batch seq"]


class KeyValues(NamedTuple):
    """KV cache of one layer, or, with a leading layer dim, of a stack of layers.

    A token is stored in the slot of its position. So prompts of unequal lengths need
    no left padding, and a query never attends to slots after its own.
    """

    key: Float[Array, "batch slots kv_heads head_dim"]
    value: Float[Array, "batch slots kv_heads v_head_dim"]


def empty_cache(
    config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike
) -> list[KeyValues]:
    """Returns zeroed caches for all stacks of a decoder.

    Latent attention caches its full heads, not the latent vectors.

    Args:
      config: Config of the decoder.
      batch: Number of rows.
      slots: Maximum number of tokens in a row.
      dtype: Dtype of keys and values: the dtype of the weights.

    Returns:
      One cache per stack of `config.layer_stacks`, with a leading layer dim.
    """
    heads = config.num_attention_heads if config.mla else config.num_key_value_heads
    shape = (batch, slots, heads)

    def stack(layers: int) -> KeyValues:
        return KeyValues(
            jnp.zeros((layers, *shape, config.head_dim), dtype),
            jnp.zeros((layers, *shape, config.v_head_dim), dtype),
        )

    return [stack(len(each.layers)) for each in config.layer_stacks]


def attend_cached(
    query: Float[Array, "batch seq heads head_dim"],
    new: KeyValues,
    cache: KeyValues,
    slots: Slots,
    *,
    scale: float,
    window: Window = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> tuple[Float[Array, "batch seq heads v_head_dim"], KeyValues]:
    """Writes new tokens to the cache, and attends from each to the tokens up to it.

    Args:
      query: Queries of the new tokens.
      new: Keys and values of the new tokens.
      cache: Cache of the previous tokens.
      slots: Slots of the new tokens: their positions.
      scale: Factor of the scores.
      window: Number of tokens that a query attends to; None for all previous tokens.
      softcap: Bound of the scores; None for no bound.
      sinks: Score per head that takes part in the softmax; None for no sinks.

    Returns:
      Weighted averages of the values, and the cache with the new tokens.
    """
    rows = jnp.arange(slots.shape[0])[:, None]
    key = cache.key.at[rows, slots].set(new.key)
    value = cache.value.at[rows, slots].set(new.value)
    visible = _visible(slots, key.shape[1], window)
    mixed = attend(query, key, value, scale, visible, softcap, sinks)
    return mixed, KeyValues(key, value)


def _visible(slots: Slots, size: int, window: Window) -> Bool[Array, "batch 1 seq s"]:
    behind = slots[:, :, None] - jnp.arange(size, dtype=jnp.int32)[None, None, :]
    visible = behind >= 0
    if window is not None:
        visible &= behind < window
    return visible[:, None]
