"""Rotary position embedding: tables of cosines and sines, and their application."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._rope_config import RopeConfig

Frequencies = Float[np.ndarray, " half_rope_dim"]
Table = Float[Array, "batch seq half_rope_dim"]


def rope_tables(
    rope: RopeConfig, dim: int, positions: Int[Array, "batch seq"], dtype: DTypeLike
) -> tuple[Table, Table]:
    """Computes cosines and sines for every position, once per forward pass.

    Angles are float32 for every compute dtype, as bfloat16 cannot distinguish
    positions 256 and 257. Only the final tables are cast, as in transformers.

    Args:
      rope: Config of the frequencies.
      dim: Number of rotated dims of a head.
      positions: Position of each token in its text.
      dtype: Dtype of the tables.

    Returns:
      Cosines and sines, one for each pair of dims.

    Source: transformers `modeling_llama.py::LlamaRotaryEmbedding`,
      `modeling_rope_utils.py::dynamic_rope_update`.
    """
    frequencies = _frequencies_of_text(rope, dim, positions)
    form = "bs,f->bsf" if frequencies.ndim == 1 else "bs,bf->bsf"
    angles = jnp.einsum(form, positions.astype(jnp.float32), frequencies)
    scale = _factor_of_text(rope, positions)
    sin = -jnp.sin(angles) if rope.clockwise else jnp.sin(angles)
    return (jnp.cos(angles) * scale).astype(dtype), (sin * scale).astype(dtype)


def _frequencies_of_text(
    rope: RopeConfig, dim: int, positions: Int[Array, "batch seq"]
) -> Float[Array, "*batch half_rope_dim"]:
    """Returns the frequencies; for two types those of each row, by its length.

    transformers takes the longest row of the batch for all of them. So the numbers of
    a row would depend on those beside it, and on which device has them.
    """
    frequencies = jnp.asarray(inverse_frequencies(rope, dim))
    length = rope.original_max_position_embeddings
    if rope.rope_type not in ("dynamic", "longrope"):
        return frequencies
    assert length is not None
    longest = jnp.max(positions, axis=-1, keepdims=True) + 1
    if rope.rope_type == "dynamic":
        assert rope.factor is not None
        times = jnp.maximum(longest, length).astype(jnp.float32) / length
        raised = (rope.factor * times - (rope.factor - 1)) ** (dim / (dim - 2))
        exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        return frequencies[None] * raised ** -exponents[None]
    if rope.short_mscale is not None:
        return frequencies
    beyond = inverse_frequencies(rope, dim, beyond=True)
    return jnp.where(longest > length, beyond[None], frequencies[None])


def _factor_of_text(
    rope: RopeConfig, positions: Int[Array, "batch seq"]
) -> np.float32 | Float[Array, "batch 1 1"]:
    """Returns the factor of the tables, which may depend on the length of a row."""
    if rope.short_mscale is None or rope.long_mscale is None:
        return np.float32(attention_factor(rope))
    length = rope.original_max_position_embeddings
    assert length is not None
    short, beyond = np.float32(rope.short_mscale), np.float32(rope.long_mscale)
    longest = jnp.max(positions, axis=-1)[:, None, None] + 1
    return jnp.where(longest > length, beyond, short)


def apply_rope(
    heads: Float[Array, "batch seq heads head_dim"],
    cos: Table,
    sin: Table,
    *,
    interleaved: bool = False,
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates pairs of the leading dims of each head.

    A pair is dims (i, i + rope_dim / 2), or two adjacent dims if `interleaved`: the
    orders of Hugging Face files, so that no weight is permuted by a conversion.

    Args:
      heads: Queries or keys; dims beyond twice the table's width are unchanged.
      cos: Cosines of the angles.
      sin: Sines of the angles.
      interleaved: Whether pairs are adjacent dims.

    Returns:
      Rotated queries or keys.
    """
    rotary, rest = jnp.split(heads, [2 * cos.shape[-1]], axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    if interleaved:
        pairs = rotary.reshape(*rotary.shape[:-1], -1, 2)
        left, right = pairs[..., 0], pairs[..., 1]
    else:
        left, right = jnp.split(rotary, 2, axis=-1)
    ends = left * cos - right * sin, right * cos + left * sin
    if interleaved:
        joined = jnp.stack(ends, axis=-1).reshape(rotary.shape)
    else:
        joined = jnp.concatenate(ends, axis=-1)
    return jnp.concatenate([joined, rest], axis=-1)


def rotate_last(
    heads: Float[Array, "batch seq heads head_dim"],
    cos: Table,
    sin: Table,
    *,
    interleaved: bool = True,
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates pairs of the last dims of each head.

    Args:
      heads: Queries or keys.
      cos: Cosines from `rope_tables`.
      sin: Sines from `rope_tables`; negated to turn back.
      interleaved: Whether pairs are adjacent dims, as for `apply_rope`.

    Returns:
      Rotated queries or keys.
    """
    kept = heads.shape[-1] - 2 * cos.shape[-1]
    rest, rotary = jnp.split(heads, [kept], axis=-1)
    rotated = apply_rope(rotary, cos, sin, interleaved=interleaved)
    return jnp.concatenate([rest, rotated], axis=-1)


def inverse_frequencies(
    rope: RopeConfig, dim: int, *, beyond: bool = False
) -> Frequencies:
    """Returns the rotation per position of each pair of dims, in radians and float32.

    Computed in numpy, so that a trace contains it as a constant of `dim / 2` values.
    Each operation is float32, in transformers' order.

    Args:
      rope: Config of the frequencies.
      dim: Number of rotated dims of a head.
      beyond: Whether to return `longrope`'s set for texts beyond the original length.

    Source: transformers `modeling_rope_utils.py`.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    base = rope.rope_theta
    if rope.alpha is not None:
        base *= rope.alpha ** (dim / (dim - 2))
    wavelengths = np.float32(base) ** exponents  # divided by 2 pi
    if rope.rope_type == "linear":
        return np.float32(1) / wavelengths / np.float32(rope.factor)
    if rope.rope_type == "proportional":
        turned = np.arange(dim // 2) < int(rope.partial_rotary_factor * dim // 2)
        return np.where(turned, np.float32(1) / wavelengths, np.float32(0))
    if rope.rope_type == "llama3":
        return _stretch_long_wavelengths(np.float32(1) / wavelengths, rope)
    if rope.rope_type == "yarn":
        return _stretch_slow_turns(wavelengths, rope, dim)
    if rope.rope_type == "longrope":
        factors = rope.long_factor if beyond else rope.short_factor
        return np.float32(1) / (np.asarray(factors, np.float32) * wavelengths)
    return np.float32(1) / wavelengths


def attention_factor(rope: RopeConfig) -> float:
    """Returns the factor of cosines and sines, which is 1 for most types.

    Source: transformers `modeling_rope_utils.py::_compute_yarn_parameters`,
      `_compute_longrope_parameters`.
    """
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "yarn":
        assert rope.factor is not None
        if rope.mscale and rope.mscale_all_dim:
            of_all = yarn_mscale(rope.factor, rope.mscale_all_dim)
            return yarn_mscale(rope.factor, rope.mscale) / of_all
        return yarn_mscale(rope.factor)
    if rope.rope_type == "longrope":
        length, factor = rope.original_max_position_embeddings, rope.factor
        assert length is not None and factor is not None
        return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1
    return 1.0


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's attention temperature for a context `factor` times longer.

    Source: YaRN, https://arxiv.org/abs/2309.00071, section 3.4.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _stretch_long_wavelengths(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    length = rope.original_max_position_embeddings
    assert low is not None and high is not None and length is not None
    factor = np.float32(rope.factor)
    wavelengths = np.float32(2 * np.pi) / frequencies
    # 0 for wavelengths that are fully stretched, 1 for those that are unchanged.
    kept = (np.float32(length) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (1 - kept) * frequencies / factor + kept * frequencies
    stretched = np.where(wavelengths > length / low, frequencies / factor, blended)
    return np.where(wavelengths < length / high, frequencies, stretched)


def _stretch_slow_turns(wavelengths: np.ndarray, rope: RopeConfig, dim: int):
    length, factor = rope.original_max_position_embeddings, rope.factor
    assert length is not None and factor is not None

    def dim_that_turns(times: float) -> float:
        # Index of the pair that rotates `times` times within the original length.
        return (
            dim
            * math.log(length / (times * 2 * math.pi))
            / (2 * math.log(rope.rope_theta))
        )

    low = dim_that_turns(rope.beta_fast or 32)
    high = dim_that_turns(rope.beta_slow or 1)
    if rope.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0  # avoids a division by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(
        high - low
    )
    kept = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    stretched = np.float32(1) / (np.float32(factor) * wavelengths)
    return stretched * (1 - kept) + np.float32(1) / wavelengths * kept
