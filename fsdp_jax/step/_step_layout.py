"""Converts parameters from their stored form to the step layout, gradients back."""

from __future__ import annotations

from collections.abc import Sequence

from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array

from fsdp_jax._tree import PyTree
from fsdp_jax.sharding._offload import Offload, on_device
from fsdp_jax.sharding._padded import Padded, pack
from fsdp_jax.sharding._plan import ParamPlan, Plan
from fsdp_jax.step._host_streaming import AHEAD


def packed(plan: Plan, params: PyTree) -> list[Array]:
    """Returns the parameters of a `TrainState` in the step layout.

    Args:
      plan: Plan of the parameters.
      params: Stored parameters, global arrays; padded ones as `Padded` or unpadded.

    Returns:
      An array for each of `plan.rows_in_step`, on the device, padded, and with a dim
      factored into two where `is_cut`.
    """
    leaves = plan.treedef.flatten_up_to(pack(params, plan.packed_params))
    values = [leaf.value if isinstance(leaf, Padded) else leaf for leaf in leaves]
    if plan.config.offload and plan.config.offload.params:
        values = _fetched(plan, plan.config.offload, values)
    return [
        _laid_out(plan, row, value.reshape(row.padded_shape)) if row.is_cut else value
        for row, value in zip(plan.rows_in_step, values, strict=True)
    ]


def placed(plan: Plan, row: ParamPlan, grad: Array) -> Array | Padded:
    """Converts a gradient from the step layout to the stored form of its parameter.

    Args:
      plan: Plan of the parameters.
      row: Plan of the parameter, in its stored form.
      grad: Gradient as it leaves `shard_map`, a global array.

    Returns:
      The gradient in the stored shape; `Padded` if the parameter is.
    """
    if row.tensor_dim is not None:
        grad = grad.reshape(row.padded_shape)  # Joins a factored dim.
        grad = _laid_out(plan, row, grad)
    return Padded(grad, row.shape) if row.is_padded else grad


def _fetched(plan: Plan, offload: Offload, arrays: Sequence[Array]) -> list[Array]:
    """Copies offloaded arrays to the device one by one, in their all-gather's dtype."""
    fetched: list[Array] = []
    for row, array in zip(plan.rows, arrays, strict=True):
        if offload.moves(array):
            # One copy after the other, so that few arrays are on the device in the
            # stored dtype, which is mostly the wider one.
            array, _ = lax.optimization_barrier((array, fetched[-AHEAD:]))
            array = on_device(array)
            if row.gather is None:
                array = array.astype(row.precision.param)
        fetched.append(array)
    return fetched


def _laid_out(plan: Plan, row: ParamPlan, x: Array) -> Array:
    """Constrains `x` to its stored sharding, with `tp`, which a step leaves to XLA."""
    spec = row.spec_with_tp(row.placements.optimizer)
    return lax.with_sharding_constraint(x, NamedSharding(plan.mesh, spec))
