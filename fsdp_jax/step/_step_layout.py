"""Parameters as a step takes them from where they rest, and gradients back there."""

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
    """The arrays of the parameters as they rest in a `TrainState`."""
    leaves = plan.treedef.flatten_up_to(pack(params, plan.packed_params))
    values = [leaf.value if isinstance(leaf, Padded) else leaf for leaf in leaves]
    if plan.config.offload and plan.config.offload.params:
        values = _fetched(plan, plan.config.offload, values)
    return [
        _laid_out(plan, row, value.reshape(row.padded_shape)) if row.is_cut else value
        for row, value in zip(plan.rows_in_step, values, strict=True)
    ]


def placed(plan: Plan, row: ParamPlan, grad: Array) -> Array | Padded:
    """A gradient as it left the ranks, in the form of its parameter at rest."""
    if row.tensor_dim is not None:
        grad = grad.reshape(row.padded_shape)  # One dim again, if a step cut it in two.
        grad = _laid_out(plan, row, grad)
    return Padded(grad, row.shape) if row.is_padded else grad


def _fetched(plan: Plan, offload: Offload, arrays: Sequence[Array]) -> list[Array]:
    """On the device, one after the other, in the dtype in which they are gathered."""
    fetched: list[Array] = []
    for row, array in zip(plan.rows, arrays, strict=True):
        if offload.moves(array):
            array, _ = lax.optimization_barrier((array, fetched[-AHEAD:]))
            array = on_device(array)
            if row.gather is None:
                array = array.astype(row.precision.param)
        fetched.append(array)
    return fetched


def _laid_out(plan: Plan, row: ParamPlan, x: Array) -> Array:
    """As it rests: over `tp` too, which the step leaves to XLA."""
    spec = row.spec_with_tp(row.placements.optimizer)
    return lax.with_sharding_constraint(x, NamedSharding(plan.mesh, spec))
