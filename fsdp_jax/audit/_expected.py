"""Expected collectives of a plan: gathers and reductions of each parameter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax.numpy as jnp

from fsdp_jax.hlo._program import Dims
from fsdp_jax.sharding._float8_gather import Float8Gather
from fsdp_jax.sharding._mesh import DATA_AXES, axes_in_use
from fsdp_jax.sharding._param_gather import needs_largest
from fsdp_jax.sharding._plan import ParamPlan, Plan

_HLO_DTYPES = {
    "bfloat16": "bf16",
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"complex{bits}": f"c{bits}" for bits in (64, 128)},
    **{f"int{bits}": f"s{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (4, 8, 16, 32, 64)},
}


@dataclasses.dataclass(frozen=True)
class ExpectedCollective:
    """One expected collective of a parameter, or of one unit's slice of it.

    Attributes:
      param: Parameter.
      kind: `gather` and `reduce` run in every use of the unit, `enter` runs at the
        beginning of the step and `deferred` once per step.
      op: Opcode, e.g. `all-gather`.
      axes: Mesh axes.
      dtype: Communicated dtype, as HLO writes it.
      sent: Dims of the array that each device sends, at tp width.
      received: Dims of the array that each device receives.
      most: Maximum number of runs per step; None if unbounded, since a unit may be used
        more than once.
    """

    param: ParamPlan
    kind: str
    op: str
    axes: tuple[str, ...]
    dtype: str
    sent: Dims
    received: Dims
    most: int | None

    @property
    def unsharded(self) -> Dims:
        """Dims of the side that is not split over `axes`."""
        return self.received if self.op == "all-gather" else self.sent


def hlo_dtype(dtype: jnp.dtype) -> str:
    """Returns HLO's name of a dtype."""
    return _HLO_DTYPES.get(dtype.name, dtype.name.replace("float8_", "f8"))


def expected_collectives(plan: Plan) -> list[ExpectedCollective]:
    """Returns all collectives over data axes that the plan expects."""
    return [
        planned for param in plan.param_plans for planned in _expected_of(plan, param)
    ] + [*_largest(plan)]


def dims_of(
    plan: Plan, param: ParamPlan, axes: tuple[str, ...], *, sliced: bool
) -> Dims:
    """Returns the dims on one device, split over the data axes `axes`, tp and ep.

    Args:
      plan: Plan of the parameter.
      param: Parameter.
      axes: Data axes that split it.
      sliced: Whether to drop the stacked dims, for the slice of one unit.
    """
    dims = param.split.on_device(plan.mesh, param.padded_shape, axes)
    return dims[param.num_stacked if sliced else 0 :]


def _expected_of(plan: Plan, param: ParamPlan) -> Iterator[ExpectedCollective]:
    places = param.placements
    dtype = "u8" if param.gather else hlo_dtype(param.precision.param)
    enters = tuple(a for a in places.optimizer if a not in places.parameter)
    for view in _views(plan, param):
        if places.parameter:
            yield ExpectedCollective(
                param,
                "gather",
                "all-gather",
                places.parameter,
                dtype,
                view(dims_of(plan, param, places.parameter, sliced=True)),
                view(dims_of(plan, param, (), sliced=True)),
                None,
            )
        if enters:
            yield ExpectedCollective(
                param,
                "enter",
                "all-gather",
                enters,
                dtype,
                view(dims_of(plan, param, places.optimizer, sliced=False)),
                view(dims_of(plan, param, places.parameter, sliced=False)),
                1,
            )
    if not param.is_frozen:
        yield from _reductions(plan, param)


def _views(plan: Plan, param: ParamPlan) -> list[Callable[[Dims], Dims]]:
    """Returns functions from the dims of a shard to those of what is communicated.

    Formats in blocks gather scales beside the values.
    """
    if param.gather is None:
        return [lambda dims: dims]
    count = 1 if isinstance(param.gather, Float8Gather) else 2
    return [
        lambda dims, at=at: plan.quantized_dims(param, dims)[at] for at in range(count)
    ]


def _largest(plan: Plan) -> Iterator[ExpectedCollective]:
    """Yields the all-reduces of the float8 amaxes, concatenated over all tensors."""
    scaled = [param for param in plan.param_plans if needs_largest(param.gather)]
    for axes in dict.fromkeys(param.placements.optimizer for param in scaled):
        own = [param for param in scaled if param.placements.optimizer == axes]
        stacks = [
            param.split.on_device(plan.mesh, param.padded_shape, ())[
                : param.num_stacked
            ]
            for param in own
        ]
        dims = (sum(map(math.prod, stacks)),)
        yield ExpectedCollective(
            own[0], "enter", "all-reduce", axes, "f32", dims, dims, 1
        )


def _reductions(plan: Plan, param: ParamPlan) -> Iterator[ExpectedCollective]:
    places, precision = param.placements, param.precision
    scatter = "all-to-all" if precision.accumulate_wide else "reduce-scatter"
    communicated = hlo_dtype(precision.grad_comm)
    if places.gradient:
        unsharded = dims_of(plan, param, (), sliced=True)
        yield ExpectedCollective(
            param,
            "reduce",
            scatter,
            places.gradient,
            communicated,
            unsharded,
            dims_of(plan, param, places.gradient, sliced=True),
            None,
        )
    deferred = param.deferred_axes(axes_in_use(plan.mesh, ("pp", *DATA_AXES)))
    scattered = tuple(a for a in places.optimizer if a in deferred)
    summed = tuple(a for a in deferred if a not in scattered)
    wide = (
        hlo_dtype(precision.main_grads) if precision.accumulate_wide else communicated
    )
    # A stack is reduced unit by unit in the last backward, or as a whole after it.
    for sliced in (False, True) if param.num_stacked else (False,):
        before = dims_of(plan, param, places.gradient, sliced=sliced)
        after = dims_of(plan, param, places.optimizer, sliced=sliced)
        stack = math.prod(param.shape[: param.num_stacked]) if sliced else 0
        # A scan that delays the reduction by one unit also reduces zeros once.
        most = stack + 1
        if scattered:
            yield ExpectedCollective(
                param, "deferred", scatter, scattered, communicated, before, after, most
            )
        if summed:
            yield ExpectedCollective(
                param, "deferred", "all-reduce", summed, wide, after, after, most
            )
