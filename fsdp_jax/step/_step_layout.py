"""Converts parameters from their stored form to the step layout, gradients back."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array

from fsdp_jax._tree import PyTree
from fsdp_jax.sharding._offload import OffloadPolicy, on_device
from fsdp_jax.sharding._padded import Padded, pack
from fsdp_jax.sharding._plan import ParamPlan, Plan
from fsdp_jax.step._host_streaming import AHEAD


def packed(plan: Plan, params: PyTree) -> list[Array]:
    """Returns the parameters of a `TrainState` in the step layout.

    Args:
      plan: Plan of the parameters.
      params: Stored parameters, global arrays; padded ones as `Padded` or unpadded.

    Returns:
      An array for each of `plan.params_in_step`, padded, and with a dim factored into
      two where `is_factored`; on the device, but on the host where `is_streamed`.
    """
    leaves = plan.treedef.flatten_up_to(pack(params, plan.packed_params))
    values = [leaf.value if isinstance(leaf, Padded) else leaf for leaf in leaves]
    if plan.config.offload and plan.config.offload.params:
        values = _fetched(plan, plan.config.offload, values)
    return [
        _laid_out(plan, param, value.reshape(param.padded_shape))
        if param.split.is_factored
        else value
        for param, value in zip(plan.params_in_step, values, strict=True)
    ]


def placed(plan: Plan, param: ParamPlan, grad: Array) -> Array | Padded:
    """Converts a gradient from the step layout to the stored form of its parameter.

    Args:
      plan: Plan of the parameters.
      param: Plan of the parameter, in its stored form.
      grad: Gradient as it leaves `shard_map`, a global array.

    Returns:
      The gradient in the stored shape; `Padded` if the parameter is.
    """
    if param.split.tensor_dim is not None:
        grad = grad.reshape(param.padded_shape)  # Joins a factored dim.
        grad = _laid_out(plan, param, grad)
    return Padded(grad, param.shape) if param.is_padded else grad


def _fetched(
    plan: Plan, offload: OffloadPolicy, arrays: Sequence[Array]
) -> list[Array]:
    """Copies offloaded arrays to the device one by one, in their all-gather's dtype.

    Those that are streamed stay in host memory.
    """
    fetched: list[Array] = []
    for param, array in zip(plan.param_plans, arrays, strict=True):
        if offload.moves(array):
            if param.is_streamed:
                # Units copy their slices. Says to XLA where the array is, also where
                # it is compiled for abstract devices, whose shardings name no memory.
                fetched.append(jax.device_put(array, jax.memory.Space.Host))
                continue
            # One copy after the other, so that few arrays are on the device in the
            # stored dtype, which is mostly the wider one.
            array, _ = lax.optimization_barrier((array, fetched[-AHEAD:]))
            array = on_device(array)
            if param.gather is None:
                array = array.astype(param.precision.param)
        fetched.append(array)
    return fetched


def _laid_out(plan: Plan, param: ParamPlan, x: Array) -> Array:
    """Constrains `x` to its stored sharding, with `tp`, which a step leaves to XLA."""
    spec = param.spec_with_tp(param.placements.optimizer)
    return lax.with_sharding_constraint(x, NamedSharding(plan.mesh, spec))
