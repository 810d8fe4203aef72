"""Masked reductions over all ranks: sum, count, mean, variance, whitening, extrema."""

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
    """Returns the sum of the values that the mask selects, over all ranks.

    Values that the mask excludes are not read: neither their NaNs nor their gradients
    propagate, as they would if multiplied by the mask.

    Within a loss under a plan, and in any other `shard_map`, arrays are local to one
    rank, and the sum also runs over the ranks of `axes`; all ranks get the same result.
    Elsewhere arrays are global, and `axes` has no effect. The gradient is that of the
    global value: a loss that is a `masked_mean` over all ranks trains as one device
    would on the whole batch, with one microbatch per step. With several, see
    `calculate_per_token_loss`.

    Args:
      values: Values of any floating dtype; sums are in float32.
      mask: True, or a weight, for values that count.
      axes: Mesh axes whose ranks have different values; () for this rank's values
        alone.

    Returns:
      The sum, float32.

    Raises:
      ValueError: If `axes` are not axes of the mesh, or shapes differ.

    Source: verl `utils/torch_functional.py::masked_sum`.
    """
    _check(values, mask, axes)
    return _over_ranks(lax.psum, _weighted(values, mask).sum(), axes)


def masked_count(mask: Mask, *, axes: Sequence[str] = DATA_AXES) -> Num[Array, ""]:
    """Returns the number of selected values of all ranks, or the sum of weights.

    Args:
      mask: Mask, as in `masked_sum`.
      axes: Mesh axes, as in `masked_sum`.

    Returns:
      An exact int32 for a mask of bools or integers; a float32 otherwise.
    """
    _check(mask, mask, axes)
    return _over_ranks(lax.psum, _weights(mask).sum(), axes)


def masked_mean(
    values: Values, mask: Mask, *, axes: Sequence[str] = DATA_AXES
) -> Scalar:
    """Returns the mean of the selected values, over all ranks; 0 if there are none.

    Each value weighs the same, however unevenly ranks have them.

    Args:
      values: Values, as in `masked_sum`.
      mask: Mask, as in `masked_sum`.
      axes: Mesh axes, as in `masked_sum`.

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
    """Returns the variance of the values that the mask selects, over all ranks.

    It is computed in two passes, so that a mean far from zero costs no precision.

    Args:
      values: Values, as in `masked_sum`.
      mask: Mask, as in `masked_sum`.
      unbiased: Whether to divide by the count minus one.
      axes: Mesh axes, as in `masked_sum`.

    Returns:
      The variance, float32; NaN for fewer than two values if `unbiased`, else for none.

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
    """Subtracts the mean of the selected values and divides by their deviation.

    Args:
      values: Values, as in `masked_sum`.
      mask: Mask, as in `masked_sum`.
      shift_mean: Whether the mean of the result is zero; else the mean is kept.
      eps: Constant added to the variance.
      axes: Mesh axes, as in `masked_sum`.

    Returns:
      The whitened values, in float32, and 0 where the mask does not select them; NaN if
      it selects fewer than two.

    Source: verl `utils/torch_functional.py::masked_whiten`, which also moves values
      that the mask excludes.
    """
    kept = _kept(values, mask)
    mean = masked_mean(kept, mask, axes=axes)
    var = masked_var(kept, mask, axes=axes)
    whitened = (kept - mean) * lax.rsqrt(var + eps)
    return jnp.where(mask != 0, whitened if shift_mean else whitened + mean, 0)


def masked_max(
    values: Values, mask: Mask, *, axes: Sequence[str] = DATA_AXES
) -> Scalar:
    """Returns the largest selected value over all ranks, for metrics.

    Args:
      values: Values, as in `masked_sum`.
      mask: Mask, as in `masked_sum`.
      axes: Mesh axes, as in `masked_sum`.

    Returns:
      The maximum, float32; minus infinity if there is none. It has no gradient.

    Source: verl `utils/torch_functional.py::distributed_mean_max_min_std`.
    """
    _check(values, mask, axes)
    values = lax.stop_gradient(_wide(values))
    local = jnp.where(mask != 0, values, -jnp.inf).max(initial=-jnp.inf)
    return _over_ranks(lax.pmax, local, axes)


def masked_min(
    values: Values, mask: Mask, *, axes: Sequence[str] = DATA_AXES
) -> Scalar:
    """Returns the smallest selected value over all ranks, for metrics.

    Args:
      values: Values, as in `masked_sum`.
      mask: Mask, as in `masked_sum`.
      axes: Mesh axes, as in `masked_sum`.

    Returns:
      The minimum, float32; infinity if there is none. It has no gradient.

    Source: verl `utils/torch_functional.py::distributed_mean_max_min_std`.
    """
    return -masked_max(-values, mask, axes=axes)


def _weighted(values: Array, mask: Array) -> Array:
    kept = _kept(values, mask)
    return kept * _weights(mask).astype(kept.dtype)


def _kept(values: Array, mask: Array) -> Array:
    """Returns values in float32; 0 where excluded, so that 0 never multiplies a NaN."""
    return jnp.where(mask != 0, _wide(values), 0)


def _weights(mask: Array) -> Array:
    """Returns weights as int32 or float32: bfloat16 would stop counting at 256."""
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
            "result would be that of one rank. Pass axes=..., the axes whose ranks "
            "hold different values."
        )
