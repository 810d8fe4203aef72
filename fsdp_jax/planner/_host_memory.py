"""What of a state rests on the host: told to XLA's compiler, and counted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Set
from typing import Any

import jax
from jax.extend.mlir import ir

from fsdp_jax._tree import PyTree
from fsdp_jax.planner.liveness._operations import Program, Value
from fsdp_jax.sharding._offload import HOST
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._state import TrainState


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """What rests on the host instead of a device, and what a step copies of it.

    Attributes:
      bytes: At rest, for one device.
      fetched: To the device, a step.
      returned: Back to the host, a step.
    """

    bytes: int
    fetched: int
    returned: int

    def seconds(self, bandwidth: float) -> float:
        """Of the copies if nothing hides them; both directions at once.

        Args:
          bandwidth: Bytes a second in one direction.
        """
        return max(self.fetched, self.returned) / bandwidth


def offloaded(plan: Plan, state: TrainState) -> Offloaded:
    """Counts what a mould of the state has on the host."""
    params, optimizer = (
        sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))
        for tree in _split(plan, state)[1]
    )
    # Weights are fetched when the step begins, and again to be updated.
    both = params + optimizer
    return Offloaded(both, both + params, both)


def resident(plan: Plan, state: TrainState) -> TrainState:
    """The mould without what rests on the host."""
    params, opt_state = _split(plan, state)[0]
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def entered(plan: Plan, program: Program) -> Set[Value]:
    """What units gather where the main weights are on the host: made for one step.

    Args:
      plan: The plan.
      program: What a device does in a step.
    """
    offload = plan.config.offload
    if not (offload and offload.params):
        return set()
    leaves = jax.tree.leaves(plan.packed_params)
    made = {
        (row.num_elements(plan.mesh, row.placements.optimizer), row.precision.param)
        for row, leaf in zip(plan.rows, leaves, strict=True)
        if offload.moves(leaf) and row.gather is None
    }
    return {v for v in program.inputs if (math.prod(v.shape), v.dtype) in made}


def mark_host_arguments(
    plan: Plan, lowered: jax.stages.Lowered, state: TrainState
) -> None:
    """Tells the compiler which arguments of a lowered step lie on the host.

    Stand-ins for GPUs know no memories, so that their shardings cannot say it.

    Args:
      plan: The plan.
      lowered: From `step.lower(state, batch)`; changed in place.
      state: The mould of the state.
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
    """The path that an argument is named by in its location."""
    return str(argument.location).removeprefix('loc("').removesuffix('")')


def _split(plan: Plan, state: TrainState) -> tuple[tuple[PyTree, PyTree], ...]:
    """(parameters, optimizer state) on the device, and the same on the host."""
    offload = plan.config.offload
    chosen = (offload.params, offload.optimizer) if offload else (False, False)
    trees = list(zip((state.params, state.opt_state), chosen, strict=True))

    def only(tree, is_chosen, *, on_host):
        def keep(leaf):
            is_there = bool(offload and is_chosen and offload.moves(leaf))
            return leaf if is_there == on_host else None

        return jax.tree.map(keep, tree)

    here, there = (
        tuple(only(tree, is_chosen, on_host=on_host) for tree, is_chosen in trees)
        for on_host in (False, True)
    )
    return here, there


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
