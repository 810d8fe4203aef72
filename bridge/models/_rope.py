"""Rotary position embedding: the tables, and the turn."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._config import DecoderConfig, RopeConfig


def rope_tables(
    config: DecoderConfig, positions: Int[Array, "batch seq"], dtype: DTypeLike
) -> tuple[Float[Array, "batch seq head_dim"], Float[Array, "batch seq head_dim"]]:
    """Computes cosines and sines for every position, once per forward pass.

    Angles are float32 whatever the compute dtype: bfloat16 cannot tell position 257
    from 256. Only the finished tables are cast, as in transformers.

    Args:
      config: Gives `head_dim` and the frequencies.
      positions: Position of each token in its text.
      dtype: Compute dtype of the tables.

    Returns:
      Cosines and sines; the second half of the last dim repeats the first.

    Source: transformers `modeling_llama.py::LlamaRotaryEmbedding`.
    """
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    angles = jnp.einsum("bs,f->bsf", positions.astype(jnp.float32), frequencies)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def apply_rope(
    heads: Float[Array, "batch seq heads head_dim"],
    cos: Float[Array, "batch seq head_dim"],
    sin: Float[Array, "batch seq head_dim"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Turns each pair (i, i + head_dim / 2) of a head by its angle.

    Pairs are halves apart, not neighbours: that is the order of Hugging Face files,
    so no weight is permuted on the way in or out.
    """
    left, right = jnp.split(heads, 2, axis=-1)
    rotated = jnp.concatenate([-right, left], axis=-1)
    return heads * cos[:, :, None, :] + rotated * sin[:, :, None, :]


def inverse_frequencies(
    rope: RopeConfig, head_dim: int
) -> Float[np.ndarray, " half_head_dim"]:
    """Returns the angle that each pair of a head turns per position, in float32.

    Computed in numpy, so that a trace holds it as a constant of `head_dim / 2`
    numbers. Each operation is float32, in transformers' order.

    Source: transformers `modeling_rope_utils.py`.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.float32(rope.rope_theta) ** exponents
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        return _stretch_long_wavelengths(frequencies, rope)
    return frequencies


def _stretch_long_wavelengths(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    length = rope.original_max_position_embeddings
    assert low is not None and high is not None and length is not None
    factor = np.float32(rope.factor)
    wavelengths = np.float32(2 * np.pi) / frequencies
    # 0 for wavelengths to be stretched in full, 1 for those to be left alone.
    kept = (np.float32(length) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (1 - kept) * frequencies / factor + kept * frequencies
    stretched = np.where(wavelengths > length / low, frequencies / factor, blended)
    return np.where(wavelengths < length / high, frequencies, stretched)
