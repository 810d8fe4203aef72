"""What of a step's memory is what, from its plan and its trace alone.

No compiler is asked. A trace says what is computed in which order, and what of it XLA
has to write to memory follows from a few rules: what matrix products, collectives and
loops read and write is there as a whole; what is computed element by element in between
never is.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax.extend import core

from fsdp_jax._plan import Plan
from fsdp_jax._tree import PyTree
from fsdp_jax.planner._trace import Operation, Program, Value, on_one_device

VIEWS = {
    "reshape",
    "squeeze",
    "expand_dims",
    "optimization_barrier",
    "copy",
    "stop_gradient",
    "reshard",
    "name",
    "pvary",
    "sharding_constraint",
}
"""Primitives whose result lies where what they read lies."""

KERNELS = {
    "dot_general",
    "conv_general_dilated",
    "ragged_dot",
    "ragged_dot_general",
    "all_gather",
    "reduce_scatter",
    "psum_scatter",
    "psum",
    "psum_invariant",
    "all_to_all",
    "ragged_all_to_all",
    "ppermute",
    "pmax",
    "sort",
    "top_k",
    "cumsum",
    "cumprod",
    "cummax",
    "scatter",
    "scatter-add",
    "scatter_add",
    "gather",
    "scan",
    "while",
    "cond",
    "dynamic_update_slice",
    "dot_product_attention_fwd_wrapper",
    "dot_product_attention_bwd_wrapper",
}
"""Primitives that read and write whole arrays."""

REDUCTIONS = {
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "argmax",
    "argmin",
}
"""Primitives that write whole arrays, but compute what they read as they go."""

WORKSPACE = 4 << 20
"""Bytes that a matrix product of cuBLAS takes besides, one at a time."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device at the fullest moment of a step, by what they are.

    Attributes:
      params: Parameters at rest.
      optimizer: Optimizer state at rest.
      gradients: Reduced and accumulated ones, and a unit's before they are reduced.
      gathered: Whole weights: of units, and of what belongs to none.
      saved: Activations kept for backward.
      activations: What the unit at work computes with.
      logits: What is computed outside of all stacks of units: the head, the loss.
      other: The batch, the rest of the state, workspace.
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
        """All of them."""
        return sum(dataclasses.astuple(self))


def predict_memory(
    plan: Plan, state: PyTree, batch: PyTree, traced: core.ClosedJaxpr
) -> Memory:
    """Predicts the fullest moment of a step.

    Args:
      plan: Its plan.
      state: The mould of the train state, as from `abstract_state`.
      batch: The mould of the global batch.
      traced: `step.jitted.trace(state, batch).jaxpr`.
    """
    at_rest = {
        "params": _bytes_on_a_device(state.params),
        "optimizer": _bytes_on_a_device(state.opt_state),
    }
    arguments = _bytes_on_a_device((state, batch), plan)
    program = on_one_device(traced.jaxpr)
    assert program is not None, "a step is a shard_map"
    grads = {
        (tuple(value.shape), value.dtype)
        for value in program.outputs
        if value is not None and value.shape
    }
    peak = _Walk(plan, grads).peak(program, set(program.inputs))
    kinds = ("gradients", "gathered", "saved", "activations", "logits", "other")
    found = {kind: peak.get(kind, 0) for kind in kinds}
    found["other"] += arguments - sum(at_rest.values()) + WORKSPACE
    return Memory(**at_rest, **found)


def _bytes_on_a_device(tree: PyTree, plan: Plan | None = None) -> int:
    """Bytes of moulds on one device; those without a sharding lie as batches do."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if sharding is None and plan is not None:
            sharding = plan.batch_sharding
        shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        total += math.prod(shape) * (8 if is_key else leaf.dtype.itemsize)
    return total


Sizes = Mapping[str, int]


class _Walk:
    """Walks programs, keeping account of what lies in memory."""

    def __init__(self, plan: Plan, grads: set):
        self.grads = grads
        self.whole = {
            (row.shape[row.num_stacked :], row.precision.grad_comm) for row in plan.rows
        } | {(row.shape[row.num_stacked :], row.precision.param) for row in plan.rows}
        self.stacked = {row.unit for row in plan.rows if row.num_stacked}

    def peak(
        self,
        program: Program,
        kept: set[Value],
        generated: Iterable[Value] = (),
        inside: str = "",
    ) -> Sizes:
        """The sizes at the fullest moment, without those of the program's inputs.

        Args:
          program: The program.
          kept: Inputs that must not be written to, being needed again.
          generated: Inputs that nobody holds, being made where they are used.
          inside: The scopes around the program.
        """
        account = _Account(program, kept, generated)
        best: Sizes = {}
        live: dict[Value, str] = {}
        for at, operation in enumerate(program.operations):
            for value in account.made_at[at]:
                if value not in live:
                    live[value] = self._kind(operation, value, account, inside)
            extra: Sizes = {}
            for body in operation.bodies:
                kept, made = _constants(operation, body, account)
                scopes = f"{inside}{operation.scopes}"
                extra = _larger(extra, self.peak(body, kept, made, scopes))
            now = _sum_by_kind(live, extra)
            best = _larger(best, now)
            for value in account.dead_after[at]:
                live.pop(value, None)
        return best

    def _kind(
        self, operation: Operation, value: Value, account: _Account, inside: str
    ) -> str:
        key = (value.shape, value.dtype)
        if value in account.gathered:
            return "gathered"
        if key in self.grads:
            return "gradients"
        if value in account.to_reduce:
            return "gradients"
        if key in self.whole and operation.name in ("scan", "broadcast_in_dim"):
            # What a loop hands on of a unit: the next weights, or zeros to begin with.
            return "gathered" if operation.name == "scan" else "gradients"
        if operation.name == "scan":
            return "saved"
        scopes = f"{inside}{operation.scopes}"
        in_stack = any(f"unit:{unit}" in scopes for unit in self.stacked)
        return "activations" if inside and in_stack else "logits"


class _Account:
    """Which values of a program are written to memory, when, and until when."""

    def __init__(self, program: Program, kept: set[Value], generated: Iterable[Value]):
        self.program = program
        self.kept = kept
        self.generated = set(generated)
        self.home: dict[Value, Value] = {}  # a view -> what it is a view of
        self.sources: dict[Value, frozenset[Value]] = {}
        self.gathered: set[Value] = set()
        self.to_reduce: set[Value] = set()
        inputs = set(program.inputs) - self.generated
        written = self._written(inputs)
        last = self._last_reads(written, inputs)
        self.made_at: list[list[Value]] = [[] for _ in program.operations]
        self.dead_after: list[list[Value]] = [[] for _ in program.operations]
        made: dict[Value, int] = {}
        for at, operation in enumerate(program.operations):
            new = [v for v in operation.inputs if v in self.generated]
            for value in (*new, *operation.outputs):
                home = self.home.get(value, value)
                if home in inputs or home not in written or home in made:
                    continue
                made[home] = at
        for home, begin in made.items():
            self.made_at[begin].append(home)
            end = max(last.get(home, begin), begin)
            if end < len(program.operations):
                self.dead_after[end].append(home)

    def _written(self, inputs: set[Value]) -> set[Value]:
        """Values that are in memory as a whole."""
        written = set(inputs)
        results = {v for v in self.program.outputs if v is not None}
        for operation in self.program.operations:
            self._trace_homes(operation)
            reads = [v for v in operation.inputs if v is not None]
            if operation.name not in KERNELS | set(VIEWS):
                if all(v in self.generated for v in reads):
                    self.generated.update(operation.outputs)
            if operation.name in KERNELS:
                if operation.name == "scan":
                    consts = operation.params["num_consts"]
                    reads = [
                        v
                        for at, v in enumerate(operation.inputs)
                        if v and (at >= consts or v not in self.generated)
                    ]
                written.update(self._homes(reads))
                written.update(self._homes(operation.outputs))
            elif operation.name in REDUCTIONS:
                written.update(operation.outputs)
        written.update(self._homes(results))
        # Constants and counters need no room to speak of.
        return {v for v in written if v.bytes >= 1024}

    def _trace_homes(self, operation: Operation) -> None:
        name, reads = operation.name, [v for v in operation.inputs if v is not None]
        if name in VIEWS:
            for read, made in zip(operation.inputs, operation.outputs, strict=False):
                if read is not None and read.bytes == made.bytes:
                    self.home[made] = self.home.get(read, read)
        if name == "dynamic_update_slice" and reads:
            target = operation.inputs[0]
            if target is not None and self.home.get(target, target) not in self.kept:
                self.home[operation.outputs[0]] = self.home.get(target, target)
        if name == "scan":
            self._carry_in_place(operation)
        if name == "all_gather":
            self.gathered.update(operation.outputs)
        elif name not in KERNELS and reads:
            arrays = [v for v in reads if v.bytes >= 1024]
            if arrays and all(self.home.get(v, v) in self.gathered for v in arrays):
                self.gathered.update(operation.outputs)
        if name in ("reduce_scatter", "psum_scatter", "all_to_all"):
            self.to_reduce.update(self._homes(operation.inputs))

    def _carry_in_place(self, operation: Operation) -> None:
        consts, carry = operation.params["num_consts"], operation.params["num_carry"]
        begin = operation.inputs[consts : consts + carry]
        for read, made in zip(begin, operation.outputs, strict=False):
            if read is None or read.bytes < 1024:
                continue
            if (home := self.home.get(read, read)) not in self.kept:
                self.home[made] = home

    def _last_reads(self, written: set[Value], inputs: set[Value]):
        """Written value -> the last operation that reads it, through all it fuses."""
        last: dict[Value, int] = {}
        end = len(self.program.operations)
        sources: dict[Value, frozenset[Value]] = {}
        for at, operation in enumerate(self.program.operations):
            read = frozenset().union(
                *(self._needs(v, written, sources) for v in operation.inputs if v)
            )
            fuses = operation.name not in KERNELS | REDUCTIONS
            for value in operation.outputs:
                home = self.home.get(value, value)
                if fuses and home not in written:
                    sources[value] = read
            if not fuses or any(
                self.home.get(v, v) in written for v in operation.outputs
            ):
                for value in read:
                    last[value] = at
        for value in self.program.outputs:
            if value is not None:
                for home in self._needs(value, written, sources):
                    last[home] = end
        return last

    def _needs(self, value: Value, written, sources) -> frozenset[Value]:
        home = self.home.get(value, value)
        if home in written:
            return frozenset([home])
        return sources.get(value, sources.get(home, frozenset()))

    def _homes(self, values: Iterable[Value | None]) -> set[Value]:
        return {self.home.get(v, v) for v in values if v is not None}


def _constants(
    operation: Operation, body: Program, account: _Account
) -> tuple[set[Value], set[Value]]:
    """A loop's inputs that stay as they are, and those made anew in each iteration."""
    if operation.name != "scan":
        return set(body.inputs), set()
    consts, carry = operation.params["num_consts"], operation.params["num_carry"]
    kept = {*body.inputs[:consts], *body.inputs[consts + carry :]}
    outer = operation.inputs[:consts]
    made = {
        inner
        for inner, read in zip(body.inputs[:consts], outer, strict=True)
        if read in account.generated
    }
    return kept - made, made


def _sum_by_kind(live: Mapping[Value, str], extra: Sizes) -> Sizes:
    sizes: collections.Counter[str] = collections.Counter(extra)
    for value, kind in live.items():
        sizes[kind] += value.bytes
    return sizes


def _larger(a: Sizes, b: Sizes) -> Sizes:
    return a if sum(a.values()) >= sum(b.values()) else b
