"""Shapes and shardings of an optimizer's state: by the parameters it belongs to.

The matrices of a layer-wise optimizer (Muon) have a layout of their own, in
`optim/_matrix_stack.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.tree_util import DictKey

from fsdp_jax._tree import PyTree, known_end
from fsdp_jax.optim._matrix_stack import MatrixStack
from fsdp_jax.sharding._config import Placements
from fsdp_jax.sharding._fully_shard import choose_split
from fsdp_jax.sharding._mesh import num_devices
from fsdp_jax.sharding._padded import Padded
from fsdp_jax.sharding._param_plan import ParamPlan
from fsdp_jax.sharding._param_split import ParamSplit
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._optimizer import abstract_optimizer_state
from fsdp_jax.training._trainable import seen_by_optimizer
from fsdp_jax.training._unnamed import all_of, unnamed_arrays

GROWS_WITH_MODEL = 4096
"""Elements from which an array of no parameter is padded where no dim divides evenly.

Smaller ones are coefficients and are replicated, as are vectors of a few biases.
"""


def abstract_opt_state(plan: Plan, tx: optax.GradientTransformation) -> PyTree:
    """Shards the optimizer's arrays by path and shape, for any optimizer.

    An array whose path ends in a parameter's path, or in its dotted name as a key,
    belongs to that parameter. If it has the parameter's shape, it is sharded like it;
    if not (Adafactor's factors), or if it belongs to no parameter, it is sharded over
    the same axes on a dim of its own. An array without a dim of at least 2 elements is
    replicated, and so is one that belongs to a replicated parameter, or a small one
    that belongs to none and divides by no number of shards.

    An array that belongs to no parameter may hold values of several by position, such
    as the one vector of `optax.flatten`. Its `Padded.of` identifies the parameters, so
    that a checkpoint of it does not load for others.
    """
    params = seen_by_optimizer(plan, plan.params)
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    trained = [param for param in plan.param_plans if param.is_optimized]
    by_path = {path: param for (path, _), param in zip(flat, trained, strict=True)}
    # Some optimizers keep dictionaries by dotted name.
    by_path = {(DictKey(p.name),): p for p in trained} | by_path
    everyone = all_of(trained)
    shapes = abstract_optimizer_state(tx, params)
    unnamed = unnamed_arrays(
        tx, params, shapes, lambda path: known_end(path, by_path) is None
    )

    def abstract_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, MatrixStack):
            return leaf.abstract()
        end = known_end(path, by_path)
        param = None if end is None else by_path[end]
        shape = tuple(leaf.shape)
        if param is None or shape != param.shape:
            param = _array_plan(plan, shape, param)
        of = everyone if path in unnamed else ""
        spec = param.spec_with_tp(param.placements.optimizer)
        struct = jax.ShapeDtypeStruct(
            param.padded_shape, leaf.dtype, sharding=NamedSharding(plan.mesh, spec)
        )
        return Padded(struct, shape, of) if param.is_padded or of else struct

    return jax.tree_util.tree_map_with_path(
        abstract_leaf, shapes, is_leaf=lambda node: isinstance(node, MatrixStack)
    )


def _array_plan(
    plan: Plan, shape: tuple[int, ...], owner: ParamPlan | None
) -> ParamPlan:
    """Returns the plan of an array that does not have the shape of its parameter.

    The owner is None for an array that belongs to no parameter.
    """
    param = owner or plan.param_plans[0]
    # Also for the arrays of experts: without an expert dim of its own, an array is
    # split over `ep` like any other.
    placements = plan.placements
    if owner is not None and not owner.is_expert:
        placements = owner.placements
    num_shards = num_devices(plan.mesh, placements.optimizer)
    # An array with the stack dim of its parameter is split over the pipeline stages
    # too.
    is_staged = bool(owner and owner.is_staged and shape[:1] == owner.shape[:1])
    if num_shards == 1:
        dim, padding = None, 0
    elif owner and _has_its_split_dim(shape, owner):
        dim, padding = owner.split.dim, owner.split.padding
    elif owner:
        dim, padding = choose_split(shape, num_shards, num_stacked=int(is_staged))
    else:
        # The first dim that divides evenly, so that members of a stack stay unsharded.
        even = (d for d, size in enumerate(shape) if size and not size % num_shards)
        dim, padding = next(even, None), 0
        if dim is None and math.prod(shape) >= GROWS_WITH_MODEL:
            dim, padding = choose_split(shape, num_shards, num_stacked=0)
    if dim is None:
        placements = Placements((), (), ())
    return dataclasses.replace(
        param,
        shape=shape,
        split=ParamSplit(
            dim=dim,
            padding=padding,
            is_staged=is_staged,
            stage_padding=param.split.stage_padding if is_staged else 0,
        ),
        placements=placements,
    )


def _has_its_split_dim(shape: tuple[int, ...], owner: ParamPlan) -> bool:
    """Returns whether an array differs from its parameter only in unsharded dims.

    Scales of 8-bit moments are such arrays: each scale is stored with its elements.
    """
    dim = owner.split.dim
    if dim is None or len(shape) != len(owner.shape):
        return False
    return shape[dim] == owner.shape[dim]
