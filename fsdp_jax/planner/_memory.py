"""Predicts the peak memory of a step by kind, from its plan and its trace.

No compiler is run: the trace gives the order of the operations, and `liveness` the
values in memory during each.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Set

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding

from fsdp_jax._scopes import GATHER_FOR_STEP, is_in, units_in
from fsdp_jax._tree import PyTree
from fsdp_jax.planner._host_memory import entered, resident, update_bytes
from fsdp_jax.planner._transposed_copies import transposed_bytes
from fsdp_jax.planner.liveness._lifetimes import LOOPS, Lifetimes, lifetimes
from fsdp_jax.planner.liveness._operations import ZEROS, Operation, Program, Value
from fsdp_jax.planner.liveness._overlapped_order import overlapped
from fsdp_jax.planner.liveness._schedule_order import as_run
from fsdp_jax.planner.liveness._stacked_results import stacked_early
from fsdp_jax.planner.liveness._tp_propagation import Dim, dim_of
from fsdp_jax.planner.liveness._trace import on_one_device
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._state import TrainState

WORKSPACE = 4 << 20
"""Workspace bytes of one cuBLAS matrix product; one runs at a time."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device at the peak of a step, by kind.

    Attributes:
      params: Stored parameters, without those on the host.
      optimizer: Stored optimizer state, without that on the host.
      gradients: Reduced and accumulated gradients, and a unit's unreduced ones.
      gathered: Unsharded weights, and the shards made once per step to be gathered
        from: quantized ones, those of weights stored on the host, and transposed ones.
      saved: Activations saved for backward.
      activations: Activations of the running unit.
      logits: Values computed outside of all stacks of units: the head and the loss.
      other: Batch, remaining state and workspace; and what the update of state from the
        host holds more than all kinds together, where it is the peak.
    """

    params: int
    optimizer: int
    gradients: int
    gathered: int
    saved: int
    activations: int
    logits: int
    other: int

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(dataclasses.astuple(self))


def predict_memory(
    plan: Plan, state: TrainState, batch: PyTree, traced: core.ClosedJaxpr
) -> Memory:
    """Predicts the memory at the peak of a step.

    Args:
      plan: Plan of the step.
      state: Abstract train state, as from `abstract_state`.
      batch: Abstract global batch.
      traced: Jaxpr of the step, `step.jitted.trace(state, batch).jaxpr`.
    """
    program = on_one_device(traced.jaxpr, _dims_over_tp((state, batch)))
    assert program is not None, "a step is a shard_map"
    whole, state = state, resident(plan, state)
    stored = {
        "params": _bytes_on_a_device(state.params),
        "optimizer": _bytes_on_a_device(state.opt_state),
    }
    placed = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        batch,
        plan.batch_shardings(batch),
    )
    arguments = _bytes_on_a_device((state, placed))
    grads = {
        (tuple(value.shape), value.dtype)
        for value in program.outputs
        if value is not None and value.shape
    }
    made = entered(plan, program)
    peak = _Walk(plan, grads).peak(program, set(program.inputs) - made, made=made)
    kinds = ("gradients", "gathered", "saved", "activations", "logits", "other")
    found = {kind: peak.get(kind, 0) for kind in kinds}
    found["gathered"] += transposed_bytes(plan)
    if on_host := update_bytes(plan, whole, traced):
        grown = sum(value.bytes for value in program.outputs if value and value.shape)
        found["other"] += max(0, grown + on_host - sum(found.values()))
    # Arguments other than parameters and optimizer state.
    found["other"] += arguments - sum(stored.values()) + WORKSPACE
    return Memory(**stored, **found)


def _bytes_on_a_device(tree: PyTree) -> int:
    """Returns the bytes of abstract arrays on one device.

    Arrays without a sharding are replicated.
    """
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        total += math.prod(shape) * (8 if is_key else leaf.dtype.itemsize)
    return total


def _dims_over_tp(tree: PyTree) -> list[Dim]:
    """Returns the dim of each abstract array that is split over `tp`, or None."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    return [dim_of(s.spec) if isinstance(s, NamedSharding) else None for s in shardings]


Sizes = Mapping[str, int]


class _Walk:
    """Walks programs and sums the bytes in memory by kind."""

    def __init__(self, plan: Plan, grads: set):
        self.grads = grads
        self.unsharded = {
            (
                param.split.on_device(plan.mesh, param.shape, ())[param.num_stacked :],
                dtype,
            )
            for param in plan.param_plans
            for dtype in (param.precision.grad_comm, param.precision.param)
        }
        self.weights = {
            tuple(sorted(merged))
            for shape, _ in self.unsharded
            for merged in (shape, *_with_two_dims_merged(shape))
        }
        self.stacked = {param.unit for param in plan.param_plans if param.num_stacked}

    def peak(
        self,
        program: Program,
        kept: Set[Value],
        generated: Set[Value] = frozenset(),
        inside: str = "",
        made: Set[Value] = frozenset(),
    ) -> Sizes:
        """Returns the bytes by kind at the peak, without the program's inputs.

        Args:
          program: Program to walk.
          kept: Inputs that are read again later, so that they cannot be overwritten.
          generated: Inputs that are not in memory, since they are made where they are
            used.
          inside: Scopes around the program.
          made: Inputs that live for this program only, until they are last read.
        """
        program = overlapped(program)
        found = lifetimes(program, kept, generated, is_body=bool(inside))
        makers = {value: one for one in program.operations for value in one.outputs}
        best: Sizes = {}
        live: dict[Value, str] = dict.fromkeys(made, "gathered")
        for at, operation in enumerate(program.operations):
            for value in found.made_at[at]:
                if value not in live:
                    maker = makers.get(value, operation)
                    live[value] = self._kind(maker, value, found, inside)
            extra: Sizes = {}
            for within in operation.bodies:
                body = as_run(within, operation, self.weights)
                body = stacked_early(body, operation)
                inputs = _inputs(operation, body, found)
                scopes = f"{inside}{operation.scopes}"
                extra = _larger(extra, self.peak(body, *inputs, scopes))
            # Values inside a loop or a branch are in memory beside those around it.
            now = _sum_by_kind(live, extra)
            best = _larger(best, now)
            for value in found.dead_after[at]:
                live.pop(value, None)
        return best

    def _kind(
        self, operation: Operation, value: Value, found: Lifetimes, inside: str
    ) -> str:
        key = (value.shape, value.dtype)
        if value in found.gathered or is_in(operation.scopes, GATHER_FOR_STEP):
            return "gathered"
        if key in self.grads or value in found.to_reduce:
            return "gradients"
        if key in self.unsharded and operation.name in (
            "scan",
            "broadcast_in_dim",
            ZEROS,
        ):
            # A loop carries prefetched weights of a unit; zeros with a unit's dims are
            # the initial value of a gradient.
            return "gathered" if operation.name == "scan" else "gradients"
        # Further results of a loop are stacked residuals.
        if operation.name == "scan":
            return "saved"
        scopes = f"{inside}{operation.scopes}"
        in_stack = not self.stacked.isdisjoint(units_in(scopes))
        return "activations" if inside and in_stack else "logits"


def _inputs(
    operation: Operation, body: Program, found: Lifetimes
) -> tuple[Set[Value], Set[Value]]:
    """Returns a loop body's unchanged inputs, and those generated per iteration."""
    # Only a loop may overwrite its inputs, those of its carry.
    if operation.name not in LOOPS:
        return set(body.inputs), set()
    # The condition of a while loop has inputs of its own, before those of the body.
    is_while = operation.name == "while"
    own = len(operation.inputs) - len(body.inputs) if is_while else 0
    begin, end = (at - own for at in operation.carry)
    given = operation.inputs[own:]
    # A body that runs twice an iteration has two slices of each array.
    consts = zip(body.inputs[:begin], given[:begin], strict=True)
    slices = zip(body.inputs[end:], itertools.cycle(given[end:]), strict=False)
    made = {inner for inner, read in consts if read in found.generated}
    made |= {inner for inner, read in slices if read in found.zero_stacks}
    return {*body.inputs[:begin], *body.inputs[end:]} - made, made


def _with_two_dims_merged(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the shapes in which a product of two of a weight's dims is one dim."""
    for at in range(len(shape) - 1):
        yield (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])


def _sum_by_kind(live: Mapping[Value, str], extra: Sizes) -> Sizes:
    sizes: collections.Counter[str] = collections.Counter(extra)
    for value, kind in live.items():
        sizes[kind] += value.bytes
    return sizes


def _larger(a: Sizes, b: Sizes) -> Sizes:
    return a if sum(a.values()) >= sum(b.values()) else b
