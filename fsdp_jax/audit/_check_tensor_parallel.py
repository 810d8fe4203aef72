"""Finds weight matrices that are gathered over `tp`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_jax._scopes import SEQUENCE_PARALLEL, is_in, is_of_optimizer
from fsdp_jax.audit._check_collectives import canonical
from fsdp_jax.audit._expected import dims_of
from fsdp_jax.audit._mismatch import Difference, named, observed
from fsdp_jax.hlo._concatenated import parts_of
from fsdp_jax.hlo._program import CommunicatedArray, Dims, Program
from fsdp_jax.sharding._plan import ParamPlan, Plan

FIX = (
    "constrain what the matrix reads and writes, as fsdp_jax.ops.sequence_parallel "
    "does, so that XLA moves these and not the matrix"
)


def over_tp(
    plan: Plan, program: Program, arrays: Sequence[CommunicatedArray]
) -> Iterator[Difference]:
    """Yields gathers over `tp` of matrices that the plan splits over it.

    XLA partitions `tp` by itself, so matrices are recognized by their dims. Gathers in
    the scope of `sequence_parallel` are activations, whatever their dims, and those in
    the scope of the optimizer are its own.
    """
    split = [
        r
        for r in plan.param_plans
        if r.split.tensor_dim is not None and r.ndim_in_unit > 1
    ]
    gathers = (x for x in arrays if x.axes == ("tp",) and x.op == "all-gather")
    for one in (part for whole in gathers for part in parts_of(program.module, whole)):
        if is_in(one.scope, SEQUENCE_PARALLEL) or is_of_optimizer(one.scope):
            continue
        alike = [
            (param, dims)
            for param in split
            for dims in _unsharded_dims(plan, param)
            if canonical(dims) == canonical(one.received)
        ]
        if alike:
            exact = [param for param, dims in alike if dims == one.received]
            yield Difference(
                named(exact or [param for param, _ in alike]),
                "each rank of tp computes with its own part",
                observed(one),
                FIX,
            )


def _unsharded_dims(plan: Plan, param: ParamPlan) -> list[Dims]:
    """Returns the unsharded dims of a matrix, in its stack and in one unit."""
    forms = []
    for sliced in (False, True):
        dims = list(dims_of(plan, param, (), sliced=sliced))
        assert param.split.tensor_dim is not None
        dims[param.split.tensor_dim - (len(param.shape) - len(dims))] *= (
            plan.mesh.shape["tp"]
        )
        forms.append(tuple(dims))
    return forms
