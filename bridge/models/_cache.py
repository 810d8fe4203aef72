"""Keys and values of tokens that were seen, and attention that reads them."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from bridge.models._attention import Window, attend
from bridge.models._config import DecoderConfig

Slots = Int[Array, "batch seq"]


class KeyValues(NamedTuple):
    """What one layer has seen, or, with a leading layer dim, each layer of a stack.

    A token lies in the slot of its position. So prompts of unequal lengths need no
    padding on the left, and whatever lies in a slot behind a query is never seen by it.
    """

    key: Float[Array, "batch slots kv_heads head_dim"]
    value: Float[Array, "batch slots kv_heads v_head_dim"]


def empty_cache(
    config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike
) -> list[KeyValues]:
    """Makes the caches of all stacks of a decoder.

    Latent attention keeps unfolded heads.

    Args:
      config: Sizes.
      batch: Rows.
      slots: Tokens a row can have.
      dtype: Of the weights that keys and values are computed with.

    Returns:
      For each of `config.layer_runs` one, with a leading layer dim.
    """
    heads = config.num_attention_heads if config.mla else config.num_key_value_heads
    shape = (batch, slots, heads)

    def stack(layers: int) -> KeyValues:
        return KeyValues(
            jnp.zeros((layers, *shape, config.head_dim), dtype),
            jnp.zeros((layers, *shape, config.v_head_dim), dtype),
        )

    return [stack(run.stop - run.start) for run in config.layer_runs]


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
    """Writes new tokens into the cache, and attends from each to those before it.

    Args:
      query: Queries of the new tokens.
      new: Their keys and values.
      cache: What was seen.
      slots: Where each of them lies, which is its position.
      scale: As for `dot_product_attention`.
      window: As there.
      softcap: As there.
      sinks: As there.

    Returns:
      The mixed values, and the cache with the new tokens in it.
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
