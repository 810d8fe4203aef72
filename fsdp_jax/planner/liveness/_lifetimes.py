"""Lifetimes of the values of a traced program in device memory.

Operands and results of matrix products, collectives and loops are in memory as whole
arrays. Elementwise values in between are not, since XLA fuses them into their readers.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set

from fsdp_jax.planner.liveness._operations import MOVE, Operation, Program, Value
from fsdp_jax.planner.liveness._ragged_products import EXPAND
from fsdp_jax.planner.liveness._zero_stacks import stacks_of_zeros
from fsdp_jax.step._batch_sum import SUM_OVER_BATCH
from fsdp_jax.step._grad_mark import GRADIENT

BARRIER = "optimization_barrier"

VIEWS = {
    BARRIER,
    "reshape",
    "squeeze",
    "expand_dims",
    "copy",
    "stop_gradient",
    "reshard",
    "name",
    "pvary",
    "reduce_precision",  # By which jax.checkpoint marks what it saves.
    "sharding_constraint",
    GRADIENT.name,
    SUM_OVER_BATCH.name,
}
"""Primitives whose result shares the memory of the operand."""

MAYBE_VIEWS = VIEWS | {"broadcast_in_dim"}
"""Primitives whose result shares the operand's memory if the bytes are equal."""

UPDATES = {
    "dynamic_update_slice",
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
}
"""Primitives that overwrite a part of their first operand."""

KERNELS = UPDATES | {
    MOVE,
    EXPAND,
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
    "gather",
    "scan",
    "while",
    "cond",
    "dot_product_attention_fwd_wrapper",
    "dot_product_attention_bwd_wrapper",
    "pallas_call",
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
"""Primitives that write whole arrays but fuse the computation of their operand."""

EXPENSIVE = {"exp", "exp2", "tanh"}
"""Elementwise primitives that XLA does not compute twice: with two readers, their
results are in memory."""

REDUCES = {"reduce_scatter", "psum_scatter", "all_to_all"}
"""Collectives whose operands are unsharded gradients."""

LOOPS = {"scan", "while"}
"""Primitives whose results share the memory of the carry that they begin with."""

SMALL = 1024
"""Bytes below which a value is ignored: counters, constants, statistics."""

Homes = Mapping[Value, Value]
"""Maps a value that shares another value's memory to that value."""


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """Lifetimes of the values of a program, whose inputs exist from its beginning.

    Attributes:
      made_at: Values that each operation is the first to hold in memory.
      dead_after: Values, including inputs, that each operation is the last to read.
      gathered: Unsharded weights, and values computed from these alone.
      to_reduce: Gradients that a collective will reduce.
      generated: Values computed without inputs, such as zeros.
      zero_stacks: Stacks of zeros that loops make, see `stacks_of_zeros`.
    """

    made_at: tuple[tuple[Value, ...], ...]
    dead_after: tuple[tuple[Value, ...], ...]
    gathered: Set[Value]
    to_reduce: Set[Value]
    generated: Set[Value]
    zero_stacks: Set[Value]


def lifetimes(
    program: Program,
    kept: Set[Value],
    generated: Set[Value] = frozenset(),
    *,
    is_body: bool = False,
) -> Lifetimes:
    """Returns the operations at which each value in memory is made and dies.

    Args:
      program: Program to analyse.
      kept: Inputs that are read again later, so that they cannot be overwritten.
      generated: Inputs that are not in memory, since they are made where they are used.
      is_body: Whether it is the body of a loop, at whose beginning XLA makes the zeros
        that operations within it overwrite.
    """
    stacks = stacks_of_zeros(program)
    generated = _generated(program, generated) | stacks
    homes = _homes(program, kept)
    written = _written(program, homes, generated, kept, stacks)
    last = _last_reads(program, homes, written)
    made = _made(program, homes, written, generated)
    if is_body:
        made |= dict.fromkeys(_overwritten(program) & generated & made.keys(), 0)
    made_at: list[list[Value]] = [[] for _ in program.operations]
    dead_after: list[list[Value]] = [[] for _ in program.operations]
    for value in program.inputs:
        # Outputs are last read at `len(operations)`, so they never die here.
        if (end := last.get(value, 0)) < len(program.operations):
            dead_after[end].append(value)
    for value, begin in made.items():
        made_at[begin].append(value)
        end = max(last.get(value, begin), begin)
        if end < len(program.operations):
            dead_after[end].append(value)
    return Lifetimes(
        tuple(map(tuple, made_at)),
        tuple(map(tuple, dead_after)),
        _gathered(program, homes),
        _to_reduce(program, homes),
        generated,
        stacks,
    )


def _read(operation: Operation) -> list[Value]:
    return [value for value in operation.inputs if value is not None]


def _is_fused(operation: Operation) -> bool:
    return operation.name not in KERNELS | REDUCTIONS


def _generated(program: Program, given: Set[Value]) -> Set[Value]:
    """Returns values computed elementwise from nothing, or from such values alone."""
    generated = set(given)
    for operation in program.operations:
        if operation.name in (KERNELS | VIEWS) - {MOVE}:
            continue
        if all(value in generated for value in _read(operation)):
            generated.update(operation.outputs)
    return generated


def _homes(program: Program, kept: Set[Value]) -> Homes:
    """Maps views, in-place updates and loop carries to the value they overwrite."""
    homes: dict[Value, Value] = {}
    for operation in program.operations:
        for made, read in _in_place(operation):
            home = homes.get(read, read)
            # XLA copies a kept input before an update, so the result is a new array.
            if operation.name in MAYBE_VIEWS or home not in kept:
                homes[made] = home
    return homes


def _in_place(operation: Operation) -> Iterator[tuple[Value, Value]]:
    """Yields `(result, operand)` pairs that share memory."""
    if operation.name in MAYBE_VIEWS:
        pairs = zip(operation.outputs, operation.inputs, strict=False)
        yield from (
            (made, read) for made, read in pairs if read and read.bytes == made.bytes
        )
    elif operation.name in UPDATES:
        if (target := operation.inputs[0]) is not None:
            yield operation.outputs[0], target
    elif operation.name == "ragged_all_to_all":
        # The rows that are received are written into the second operand.
        if (target := operation.inputs[1]) is not None:
            yield operation.outputs[0], target
    elif operation.name in LOOPS:
        begin, end = operation.carry
        pairs = zip(operation.outputs, operation.inputs[begin:end], strict=False)
        yield from (
            (made, read) for made, read in pairs if read and read.bytes >= SMALL
        )
    elif operation.name == "cond":
        yield from _passed_on(operation)


def _overwritten(program: Program) -> Set[Value]:
    """Returns the values that loops and exchanges of rows overwrite."""
    return {
        read
        for operation in program.operations
        if operation.name in LOOPS | {"ragged_all_to_all"}
        for _, read in _in_place(operation)
    }


def _passed_on(operation: Operation) -> Iterator[tuple[Value, Value]]:
    """Yields results that a branch returns unchanged: other branches overwrite them."""
    for branch in operation.bodies:
        # The first operand is the branch index.
        given = dict(zip(branch.inputs, operation.inputs[1:], strict=True))
        for made, result in zip(operation.outputs, branch.outputs, strict=True):
            read = given.get(result) if result is not None else None
            if read and read.bytes >= SMALL:
                yield made, read


def _at_home(values: Iterable[Value | None], homes: Homes) -> Set[Value]:
    return {homes.get(value, value) for value in values if value is not None}


def _written(
    program: Program,
    homes: Homes,
    generated: Set[Value],
    kept: Set[Value],
    stacks: Set[Value],
) -> Set[Value]:
    """Returns the values that are in memory as whole arrays at some time."""
    written = set(program.inputs) - (generated - kept)
    readers = collections.Counter(
        value
        for operation in program.operations
        if operation.name not in VIEWS
        for value in _at_home(operation.inputs, homes)
    )
    for operation in program.operations:
        if operation.name in EXPENSIVE and readers[operation.outputs[0]] > 1:
            written.update(operation.outputs)
        if operation.name in REDUCTIONS:
            written.update(operation.outputs)
        if operation.name == BARRIER:
            # XLA fuses nothing across a barrier.
            passed = [value for value in _read(operation) if value not in generated]
            written.update(_at_home(passed, homes))
        if operation.name not in KERNELS or set(operation.outputs) <= generated:
            continue
        read = list(operation.inputs)
        if operation.name == "scan":
            # A loop recomputes generated constants in each iteration.
            begin, _ = operation.carry
            consts = [v for v in read[:begin] if v not in generated]
            read = consts + [v for v in read[begin:] if v not in stacks]
        made = [v for v in operation.outputs if v not in stacks]
        written.update(_at_home(read, homes), _at_home(made, homes))
    written.update(_at_home(program.outputs, homes))
    return {value for value in written if value.bytes >= SMALL}


def _made(
    program: Program, homes: Homes, written: Set[Value], generated: Set[Value]
) -> dict[Value, int]:
    """Maps written values to the operation that is the first to hold them."""
    made: dict[Value, int] = {}
    inputs = set(program.inputs) - generated
    for at, operation in enumerate(program.operations):
        new = [value for value in _read(operation) if value in generated]
        for value in (*new, *operation.outputs):
            home = homes.get(value, value)
            if home in written and home not in inputs:
                made.setdefault(home, at)
    return made


def _last_reads(
    program: Program, homes: Homes, written: Set[Value]
) -> dict[Value, int]:
    """Maps written values to their last reader, through fused operations."""
    last: dict[Value, int] = {}
    sources: dict[Value, Set[Value]] = {}

    def needs(values: Iterable[Value | None]) -> Set[Value]:
        needed: set[Value] = set()
        for value in values:
            if value is None:
                continue
            home = homes.get(value, value)
            # A fused value is not in memory: who reads it reads its sources.
            held = home in written
            needed |= {home} if held else sources.get(value, sources.get(home, set()))
        return needed

    for at, operation in enumerate(program.operations):
        read = needs(operation.inputs)
        holds = False
        for value in operation.outputs:
            if homes.get(value, value) in written:
                holds = True
            elif _is_fused(operation):
                sources[value] = read
        if holds or not _is_fused(operation):
            last.update(dict.fromkeys(read, at))
    last.update(dict.fromkeys(needs(program.outputs), len(program.operations)))
    return last


def _gathered(program: Program, homes: Homes) -> Set[Value]:
    gathered: set[Value] = set()
    for operation in program.operations:
        read = [value for value in _read(operation) if value.bytes >= SMALL]
        if operation.name == "all_gather" or (
            operation.name not in KERNELS and read and _at_home(read, homes) <= gathered
        ):
            gathered.update(operation.outputs)
    return gathered


def _to_reduce(program: Program, homes: Homes) -> Set[Value]:
    return {
        value
        for operation in program.operations
        if operation.name in REDUCES
        for value in _at_home(operation.inputs, homes)
    }
