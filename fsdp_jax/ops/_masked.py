"""Reductions over what a mask leaves, of all ranks: sums, means, whitening."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Num

from fsdp_jax.sharding._mesh import DATA_AXES

Values = Float[Array, "*shape"]
Mask = Bool[Array, "*shape"] | Num[Array, "*shape"]
Scalar = Float[Array, ""]


def masked_sum(
    values: Values, mask: Mask, *, axes: Sequence[str] = DATA_AXES
) -> Scalar:
    """Sum of the values that the mask leaves, over all ranks.

    What the mask leaves out is not read: neither its NaN nor its gradient gets through,
    which multiplying by the mask would let.

    Within a loss under a plan, and in any other `shard_map`, arrays are what one rank
    has, and the sum is also over the ranks of `axes` there; all get the same. Elsewhere
    arrays are global, and `axes` is of no concern. The gradient is that of the global
    number: a loss that is a `masked_mean` of all ranks trains as one device would on
    the whole batch, at one microbatch a step. With several, see
    `calculate_per_token_loss`.

    Args:
      values: Of any floating dtype; sums are in float32.
      mask: True, or a weight, where a value counts.
      axes: The mesh axes on whose ranks are other values; () for this rank's alone.

    Returns:
      The sum, float32.

    Raises:
      ValueError: If `axes` are not of the mesh, or shapes differ.

    Source: verl `utils/torch_functional.py::masked_sum`.
    """
    _check(values, mask, axes)
    return _over_ranks(lax.psum, _weighted(values, mask).sum(), axes)


def masked_count(mask: Mask, *, axes: Sequence[str] = DATA_AXES) -> Num[Array, ""]:
    """How many values of all ranks the mask leaves, or the sum of its weights.

    Args:
      mask: As in `masked_sum`.
      axes: As in `masked_sum`.

    Returns:
      An int32 of a mask of bools or integers, which is exact; else a float32.
    """
    _check(mask, mask, axes)
    return _over_ranks(lax.psum, _weights(mask).sum(), axes)


def masked_mean(
    values: Values, mask: Mask, *, axes: Sequence[str] = DATA_AXES
) -> Scalar:
    """Mean of the values that the mask leaves, over all ranks; 0 of none at all.

    Each value weighs the same, however unevenly ranks have them.

    Args:
      values: As in `masked_sum`.
      mask: As in `masked_sum`.
      axes: As in `masked_sum`.

    Returns:
      The mean, float32.

    Source: verl `utils/torch_functional.py::masked_mean` and `distributed_masked_mean`,
      which divide by `count + 1e-8`, and by 0.
    """
    total = masked_sum(values, mask, axes=axes)
    count = masked_count(mask, axes=axes)
    return total / jnp.where(count == 0, 1, count).astype(total.dtype)


def masked_var(
    values: Values,
    mask: Mask,
    *,
    unbiased: bool = True,
    axes: Sequence[str] = DATA_AXES,
) -> Scalar:
    """Variance of the values that the mask leaves, over all ranks.

    In two passes, so that a mean far from zero costs no digits.

    Args:
      values: As in `masked_sum`.
      mask: As in `masked_sum`.
      unbiased: Divide by one less than there are.
      axes: As in `masked_sum`.

    Returns:
      The variance, float32; NaN of fewer than two values if `unbiased`, of none if not.

    Source: verl `utils/torch_functional.py::masked_var`, which raises where this is
      NaN: a compiled program cannot.
    """
    kept = _kept(values, mask)
    mean = masked_mean(kept, mask, axes=axes)
    squares = masked_sum((kept - mean) ** 2, mask, axes=axes)
    count = masked_count(mask, axes=axes).astype(squares.dtype)
    least = 1 if unbiased else 0
    return jnp.where(count > least, squares / (count - least), jnp.nan)


def masked_whiten(
    values: Values,
    mask: Mask,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    axes: Sequence[str] = DATA_AXES,
) -> Float[Array, "*shape"]:
    """Values less the mean, over the standard deviation, of what the mask leaves.

    Args:
      values: As in `masked_sum`.
      mask: As in `masked_sum`.
      shift_mean: Leave the mean at zero, instead of where it was.
      eps: Added to the variance.
      axes: As in `masked_sum`.

    Returns:
      The whitened values, in float32, and 0 where the mask leaves them out; NaN if
      fewer than two are left.

    Source: verl `utils/torch_functional.py::masked_whiten`, which moves those that are
      left out too.
    """
    kept = _kept(values, mask)
    mean = masked_mean(kept, mask, axes=axes)
    var = masked_var(kept, mask, axes=axes)
    whitened = (kept - mean) * lax.rsqrt(var + eps)
    return jnp.where(mask != 0, whitened if shift_mean else whitened + mean, 0)


def masked_max(
    values: Values, mask: Mask, *, axes: Sequence[str] = DATA_AXES
) -> Scalar:
    """Largest of the values that the mask leaves, over all ranks; for metrics.

    Args:
      values: As in `masked_sum`.
      mask: As in `masked_sum`.
      axes: As in `masked_sum`.

    Returns:
      The maximum, float32; minus infinity of none. It has no gradient.

    Source: verl `utils/torch_functional.py::distributed_mean_max_min_std`.
    """
    _check(values, mask, axes)
    values = lax.stop_gradient(_wide(values))
    local = jnp.where(mask != 0, values, -jnp.inf).max(initial=-jnp.inf)
    return _over_ranks(lax.pmax, local, axes)


def masked_min(
    values: Values, mask: Mask, *, axes: Sequence[str] = DATA_AXES
) -> Scalar:
    """Smallest of the values that the mask leaves, over all ranks; for metrics.

    Args:
      values: As in `masked_sum`.
      mask: As in `masked_sum`.
      axes: As in `masked_sum`.

    Returns:
      The minimum, float32; infinity of none. It has no gradient.

    Source: As `masked_max`.
    """
    return -masked_max(-values, mask, axes=axes)


def _weighted(values: Array, mask: Array) -> Array:
    kept = _kept(values, mask)
    return kept * _weights(mask).astype(kept.dtype)


def _kept(values: Array, mask: Array) -> Array:
    """In float32; 0 where left out, so that not even 0 times NaN comes of it."""
    return jnp.where(mask != 0, _wide(values), 0)


def _weights(mask: Array) -> Array:
    """Bools and integers as int32; a bfloat16 one would stop counting at 256."""
    if jnp.issubdtype(mask.dtype, jnp.floating):
        return _wide(mask)
    return mask.astype(jnp.int32)


def _wide(values: Array) -> Array:
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def _over_ranks(
    collective: Callable[..., Array], local: Array, axes: Sequence[str]
) -> Array:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    over = tuple(axis for axis in axes if axis in manual)
    return collective(local, over) if over else local


def _check(values: Array, mask: Array, axes: Sequence[str]) -> None:
    if values.shape != mask.shape:
        raise ValueError(
            f"The mask has the shape {mask.shape}, the values {values.shape}. Broadcast"
            " one to the other, so that it is clear what is counted."
        )
    mesh = jax.sharding.get_abstract_mesh()
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing and not mesh.empty:
        raise ValueError(
            f"The mesh has axes {tuple(mesh.shape)}, without {', '.join(missing)}: the "
            "sum of one rank would be left. Pass axes=..., those on whose ranks are "
            "other values."
        )
