"""Counts train state stored on the host, and marks it for XLA's compiler."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Set
from typing import Any

import jax
from jax.extend import core
from jax.extend.mlir import ir

from fsdp_jax._scopes import BY_LAYER, is_in
from fsdp_jax._tree import PyTree, known_end
from fsdp_jax.planner.liveness._operations import Program, Value
from fsdp_jax.sharding._offload import HOST, optimizer_on_host, params_on_host
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.sharding._streaming import streamed_bytes
from fsdp_jax.step._host_streaming import AHEAD
from fsdp_jax.training._state import TrainState
from fsdp_jax.training._trainable import trainable


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """State stored on the host instead of one device, and its copies per step.

    Attributes:
      bytes: Bytes stored on the host, for one device.
      fetched: Bytes copied to the device per step.
      returned: Bytes copied back to the host per step.
    """

    bytes: int
    fetched: int
    returned: int

    def seconds(self, bandwidth: float) -> float:
        """Returns the seconds of the copies if none is hidden, both directions at once.

        Args:
          bandwidth: Bytes/s in one direction.
        """
        return max(self.fetched, self.returned) / bandwidth


def offloaded(plan: Plan, state: TrainState, num_microbatches: int = 1) -> Offloaded:
    """Counts the bytes of an abstract state that are stored on the host.

    Args:
      plan: Plan of the step.
      state: Abstract train state.
      num_microbatches: Number of microbatches; each fetches streamed weights twice.
    """
    trees = _split(plan, state)[1]
    params, optimizer = (
        sum(_bytes(leaf) for leaf in jax.tree.leaves(tree)) for tree in trees
    )
    # The update neither reads nor writes frozen weights.
    updated = sum(_bytes(leaf) for leaf in jax.tree.leaves(trainable(plan, trees[0])))
    updated += optimizer
    # Weights are fetched at the beginning of the step, and again for the update; those
    # that are streamed in forward and in backward in the place of the former.
    streamed = streamed_bytes(plan.mesh, plan.param_plans)
    used = params - streamed + 2 * num_microbatches * streamed
    return Offloaded(params + optimizer, used + updated, updated)


def resident(plan: Plan, state: TrainState) -> TrainState:
    """Returns the abstract state without the leaves stored on the host."""
    params, opt_state = _split(plan, state)[0]
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def update_bytes(plan: Plan, state: TrainState, traced: core.ClosedJaxpr) -> int:
    """Returns bytes of offloaded state on one device when its update holds the most.

    `AHEAD` parameters are there with their state, and new values of one more go back;
    of stacks that the update reads layer by layer, one layer each.

    Args:
      plan: Plan of the step.
      state: Abstract train state.
      traced: Jaxpr of the step.
    """
    by_layer = _stacks_by_layer(traced)
    params, opt_state = _split(plan, state)[1]
    params = trainable(plan, params)
    paths, _ = jax.tree_util.tree_flatten_with_path(state.params)
    sizes = {path: 0 for path, _ in paths}
    for path, leaf in jax.tree_util.tree_flatten_with_path((params, opt_state))[0]:
        if (own := known_end(path, sizes)) is not None:
            layers = leaf.shape[0] if leaf.shape in by_layer else 1
            sizes[own] += _bytes(leaf) // layers
    found = list(sizes.values())
    ahead = (sum(found[at : at + AHEAD]) for at in range(len(found)))
    return max(ahead, default=0) + max(found, default=0)


def _stacks_by_layer(traced: core.ClosedJaxpr) -> Set[tuple[int, ...]]:
    """Returns the shapes of stacks that an update computes layer by layer."""
    return {
        v.aval.shape
        for eqn in traced.jaxpr.eqns
        if is_in(eqn.source_info.name_stack, BY_LAYER)
        for v in eqn.outvars
        if eqn.primitive.name in ("scan", "while") and v.aval.ndim
    }


def entered(plan: Plan, program: Program) -> Set[Value]:
    """Returns inputs that hold one step's copies of weights stored on the host.

    Units gather from these copies, which live for one step.

    Args:
      plan: Plan of the step.
      program: Program of one device.
    """
    offload = plan.config.offload
    if not (offload and offload.params):
        return set()
    leaves = jax.tree.leaves(plan.packed_params)
    made = {
        (
            param.num_elements(plan.mesh, param.placements.optimizer),
            param.precision.param,
        )
        for param, leaf in zip(plan.param_plans, leaves, strict=True)
        if offload.moves(leaf) and param.gather is None and not param.is_streamed
    }
    return {v for v in program.inputs if (math.prod(v.shape), v.dtype) in made}


def mark_host_arguments(
    plan: Plan, lowered: jax.stages.Lowered, state: TrainState
) -> None:
    """Marks the arguments of a lowered step that are in host memory.

    Shardings cannot do it, since abstract GPUs have no memories.

    Args:
      plan: Plan of the step.
      lowered: Result of `step.lower(state, batch)`; changed in place.
      state: Abstract train state.
    """
    params, opt_state = _split(plan, state)[1]
    tree = {"params": params, "opt_state": opt_state}
    names = {
        f"state.{root}{jax.tree_util.keystr(path)}"
        for root, moved in tree.items()
        for path, _ in jax.tree_util.tree_flatten_with_path(moved)[0]
    }
    module: Any = lowered.compiler_ir(dialect="stablehlo")
    (main,) = (op for op in module.body.operations if "main" in str(op.name))
    with module.context:
        marked = [
            _marked(attributes) if _name(argument) in names else attributes
            for argument, attributes in zip(main.arguments, main.arg_attrs, strict=True)
        ]
        main.arg_attrs = ir.ArrayAttr.get(marked)


def _marked(attributes: Any) -> Any:
    found = {named.name: named.attr for named in ir.DictAttr(attributes)}
    return ir.DictAttr.get({**found, "mhlo.memory_kind": ir.StringAttr.get(HOST)})


def _name(argument: Any) -> str:
    """Returns the path that an argument's location names."""
    return str(argument.location).removeprefix('loc("').removesuffix('")')


def _split(plan: Plan, state: TrainState) -> tuple[tuple[PyTree, PyTree], ...]:
    """Returns `(params, opt_state)` on the device, and the same on the host."""
    offload = plan.config.offload
    trees = (
        (state.params, params_on_host(offload, state.params)),
        (state.opt_state, optimizer_on_host(offload, state.opt_state)),
    )

    def only(tree, flags, *, on_host):
        return jax.tree.map(
            lambda leaf, is_there: leaf if is_there == on_host else None, tree, flags
        )

    here, there = (
        tuple(only(tree, flags, on_host=on_host) for tree, flags in trees)
        for on_host in (False, True)
    )
    return here, there


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
