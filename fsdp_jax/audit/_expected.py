"""Expected collectives of a plan: gathers and reductions of each parameter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp

from fsdp_jax.hlo._collectives import Dims
from fsdp_jax.sharding._low_precision import MXFP8Gather, num_blocks
from fsdp_jax.sharding._mesh import DATA_AXES, axes_in_use
from fsdp_jax.sharding._plan import ParamPlan, Plan
from fsdp_jax.step._param_layout import is_float8

_HLO_DTYPES = {
    "bfloat16": "bf16",
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"complex{bits}": f"c{bits}" for bits in (64, 128)},
    **{f"int{bits}": f"s{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (4, 8, 16, 32, 64)},
}


@dataclasses.dataclass(frozen=True)
class Leg:
    """One expected collective of a parameter, or of one unit's slice of it.

    Attributes:
      row: Parameter.
      kind: `gather` and `reduce` run in every use of the unit, `enter` runs at the
        beginning of the step and `late` once per step.
      op: Opcode, e.g. `all-gather`.
      axes: Mesh axes.
      dtype: Communicated dtype, as HLO writes it.
      sent: Dims of the array that each device sends, at tp width.
      received: Dims of the array that each device receives.
      most: Maximum number of runs per step; None if unbounded, since a unit may be used
        more than once.
    """

    row: ParamPlan
    kind: str
    op: str
    axes: tuple[str, ...]
    dtype: str
    sent: Dims
    received: Dims
    most: int | None

    @property
    def whole(self) -> Dims:
        """Dims of the side that is not split over `axes`."""
        return self.received if self.op == "all-gather" else self.sent


def hlo_dtype(dtype: jnp.dtype) -> str:
    """Returns HLO's name of a dtype."""
    return _HLO_DTYPES.get(dtype.name, dtype.name.replace("float8_", "f8"))


def legs(plan: Plan) -> list[Leg]:
    """Returns all collectives over data axes that the plan expects."""
    return [leg for row in plan.rows for leg in _legs(plan, row)] + [*_largest(plan)]


def dims_of(plan: Plan, row: ParamPlan, axes: tuple[str, ...], *, sliced: bool) -> Dims:
    """Returns the dims on one device, split over the data axes `axes`, tp and ep.

    Args:
      plan: Plan of the parameter.
      row: Parameter.
      axes: Data axes that split it.
      sliced: Whether to drop the stacked dims, for the slice of one unit.
    """
    dims = row.on_device(plan.mesh, row.padded_shape, axes)
    return dims[row.num_stacked if sliced else 0 :]


def _legs(plan: Plan, row: ParamPlan) -> Iterator[Leg]:
    places = row.placements
    param = "u8" if row.gather else hlo_dtype(row.precision.param)
    enters = tuple(a for a in places.optimizer if a not in places.parameter)
    # MXFP8 gathers block scales beside the values.
    in_blocks = isinstance(row.gather, MXFP8Gather)
    for view in (lambda dims: dims, partial(_scales, row))[: 2 if in_blocks else 1]:
        if places.parameter:
            yield Leg(
                *(row, "gather", "all-gather", places.parameter, param),
                view(dims_of(plan, row, places.parameter, sliced=True)),
                view(dims_of(plan, row, (), sliced=True)),
                None,
            )
        if enters:
            yield Leg(
                *(row, "enter", "all-gather", enters, param),
                view(dims_of(plan, row, places.optimizer, sliced=False)),
                view(dims_of(plan, row, places.parameter, sliced=False)),
                1,
            )
    if not row.frozen:
        yield from _reductions(plan, row)


def _scales(row: ParamPlan, dims: Dims) -> Dims:
    """Returns the dims of the block scales of a shard with dims `dims`."""
    scales = list(dims)
    scales[row.block_dim] = num_blocks(dims[row.block_dim])
    return tuple(scales)


def _largest(plan: Plan) -> Iterator[Leg]:
    """Yields the all-reduces of the float8 amaxes, concatenated over all tensors."""
    scaled = [row for row in plan.rows if is_float8(row)]
    for axes in dict.fromkeys(row.placements.optimizer for row in scaled):
        own = [row for row in scaled if row.placements.optimizer == axes]
        stacks = [
            row.on_device(plan.mesh, row.padded_shape, ())[: row.num_stacked]
            for row in own
        ]
        dims = (sum(map(math.prod, stacks)),)
        yield Leg(own[0], "enter", "all-reduce", axes, "f32", dims, dims, 1)


def _reductions(plan: Plan, row: ParamPlan) -> Iterator[Leg]:
    places, precision = row.placements, row.precision
    scatter = "all-to-all" if precision.accumulate_wide else "reduce-scatter"
    wire = hlo_dtype(precision.grad_comm)
    if places.gradient:
        whole = dims_of(plan, row, (), sliced=True)
        yield Leg(
            *(row, "reduce", scatter, places.gradient, wire, whole),
            dims_of(plan, row, places.gradient, sliced=True),
            None,
        )
    late = row.late_axes(axes_in_use(plan.mesh, ("pp", *DATA_AXES)))
    scattered = tuple(a for a in places.optimizer if a in late)
    summed = tuple(a for a in late if a not in scattered)
    wide = hlo_dtype(precision.main_grads) if precision.accumulate_wide else wire
    # A stack is reduced unit by unit in the last backward, or as a whole after it.
    for sliced in (False, True) if row.num_stacked else (False,):
        before = dims_of(plan, row, places.gradient, sliced=sliced)
        after = dims_of(plan, row, places.optimizer, sliced=sliced)
        stack = math.prod(row.shape[: row.num_stacked]) if sliced else 0
        # A scan that delays the reduction by one unit also reduces zeros once.
        most = stack + 1
        if scattered:
            yield Leg(row, "late", scatter, scattered, wire, before, after, most)
        if summed:
            yield Leg(row, "late", "all-reduce", summed, wide, after, after, most)
