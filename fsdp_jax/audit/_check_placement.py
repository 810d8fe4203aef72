"""Compares the shardings of a program's arguments and results with the plan."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from fsdp_jax.audit._expected import dims_of
from fsdp_jax.audit._mismatch import Difference, named
from fsdp_jax.hlo._program import Program, arguments
from fsdp_jax.sharding._plan import ParamPlan, Plan


def check_placement(plan: Plan, program: Program) -> Iterator[Difference]:
    """Yields parameters, moments and gradients that should be sharded and are not."""
    by_path = dict(zip(_paths(plan), plan.param_plans, strict=True))
    given = [("takes", *pair) for pair in arguments(program)]
    returned = [("returns", *pair) for pair in program.results]
    for verb, path, dims in [*given, *returned]:
        param = _param_of(by_path, path)
        if param is None:
            continue
        split = dims_of(plan, param, param.placements.optimizer, sliced=False)
        # A padded parameter may also appear in its logical shape, which is never split.
        unsharded = {param.padded_shape, dims_of(plan, param, (), sliced=False)} - {
            split
        }
        if dims in unsharded:
            yield Difference(
                named([param]),
                f"{list(split)} on each device",
                f"{verb} {path} as {list(dims)}",
                "place it with fsdp_jax.init_state or plan.shardings, and give a jit "
                "of your own out_shardings",
            )


def returned_params(plan: Plan, program: Program) -> list[ParamPlan]:
    """Returns the parameters of which a program returns arrays: by name and shape."""
    by_path = dict(zip(_paths(plan), plan.param_plans, strict=True))
    return [
        param
        for path, shape in program.result_shapes
        if (param := _param_of(by_path, path)) is not None
        and shape in (param.shape, param.padded_shape)
    ]


def _paths(plan: Plan) -> list[str]:
    pairs = jax.tree_util.tree_flatten_with_path(plan.params)[0]
    return [jax.tree_util.keystr(path) for path, _ in pairs]


def _param_of(by_path: dict[str, ParamPlan], path: str) -> ParamPlan | None:
    """Returns the parameter whose path ends `path`; the longest one if several do."""
    path = path.removesuffix(".value")
    found = [name for name in by_path if path.endswith(name)]
    return by_path[max(found, key=len)] if found else None
