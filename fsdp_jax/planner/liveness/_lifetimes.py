"""Which values of a traced program lie in memory, and from when until when.

What matrix products, collectives and loops read and write is there as a whole; what is
computed element by element in between is not, as XLA fuses it with what it is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set

from fsdp_jax.planner.liveness._operations import MOVE, Operation, Program, Value

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

MAYBE_VIEWS = VIEWS | {"broadcast_in_dim"}
"""The same, if they leave the number of bytes as it is."""

KERNELS = {
    MOVE,
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

REDUCES = {"reduce_scatter", "psum_scatter", "all_to_all"}
"""Collectives that take gradients as whole as their weights."""

SMALL = 1024
"""Bytes below which a value is left out: counters, constants, statistics."""

Homes = Mapping[Value, Value]
"""A value that lies where another does -> that one."""


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """What of a program is in memory when; its inputs are there when it begins.

    Attributes:
      made_at: For each operation, the values that it is the first to hold.
      dead_after: For each operation, those, and inputs, that nothing behind it reads.
      gathered: Whole weights, and what is made of these alone.
      to_reduce: Gradients on their way to be reduced.
      generated: What is made from nothing, such as zeros.
    """

    made_at: tuple[tuple[Value, ...], ...]
    dead_after: tuple[tuple[Value, ...], ...]
    gathered: Set[Value]
    to_reduce: Set[Value]
    generated: Set[Value]


def lifetimes(
    program: Program, kept: Set[Value], generated: Set[Value] = frozenset()
) -> Lifetimes:
    """Finds what lies in memory between which operations.

    Args:
      program: The program.
      kept: Inputs that are needed again, and so cannot be written over.
      generated: Inputs that nobody holds, being made where they are used.
    """
    generated = _generated(program, generated)
    homes = _homes(program, kept)
    written = _written(program, homes, generated, kept)
    last = _last_reads(program, homes, written)
    made = _made(program, homes, written, generated)
    made_at: list[list[Value]] = [[] for _ in program.operations]
    dead_after: list[list[Value]] = [[] for _ in program.operations]
    for value in program.inputs:
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
    )


def _read(operation: Operation) -> list[Value]:
    return [value for value in operation.inputs if value is not None]


def _is_fused(operation: Operation) -> bool:
    return operation.name not in KERNELS | REDUCTIONS


def _generated(program: Program, given: Set[Value]) -> Set[Value]:
    """What is made from nothing, or from that alone, element by element."""
    generated = set(given)
    for operation in program.operations:
        if operation.name in (KERNELS | VIEWS) - {MOVE}:
            continue
        if all(value in generated for value in _read(operation)):
            generated.update(operation.outputs)
    return generated


def _homes(program: Program, kept: Set[Value]) -> Homes:
    """Views, what is updated in place, and what loops hand on."""
    homes: dict[Value, Value] = {}
    for operation in program.operations:
        for made, read in _in_place(operation):
            home = homes.get(read, read)
            if operation.name in MAYBE_VIEWS or home not in kept:
                homes[made] = home
    return homes


def _in_place(operation: Operation) -> Iterator[tuple[Value, Value]]:
    """`(result, the operand it lies over)`."""
    if operation.name in MAYBE_VIEWS:
        pairs = zip(operation.outputs, operation.inputs, strict=False)
        yield from (
            (made, read) for made, read in pairs if read and read.bytes == made.bytes
        )
    elif operation.name == "dynamic_update_slice":
        if (target := operation.inputs[0]) is not None:
            yield operation.outputs[0], target
    elif operation.name == "scan":
        begin, end = operation.carry
        pairs = zip(operation.outputs, operation.inputs[begin:end], strict=False)
        yield from (
            (made, read) for made, read in pairs if read and read.bytes >= SMALL
        )
    elif operation.name == "cond":
        yield from _passed_on(operation)


def _passed_on(operation: Operation) -> Iterator[tuple[Value, Value]]:
    """What one of several branches hands on as it is: the others write over it."""
    for branch in operation.bodies:
        # The first operand says which branch runs.
        given = dict(zip(branch.inputs, operation.inputs[1:], strict=True))
        for made, result in zip(operation.outputs, branch.outputs, strict=True):
            read = given.get(result) if result is not None else None
            if read and read.bytes >= SMALL:
                yield made, read


def _at_home(values: Iterable[Value | None], homes: Homes) -> Set[Value]:
    return {homes.get(value, value) for value in values if value is not None}


def _written(
    program: Program, homes: Homes, generated: Set[Value], kept: Set[Value]
) -> Set[Value]:
    """Values that are in memory as a whole at some time."""
    written = set(program.inputs) - (generated - kept)
    for operation in program.operations:
        if operation.name in REDUCTIONS:
            written.update(operation.outputs)
        if operation.name not in KERNELS or set(operation.outputs) <= generated:
            continue
        read = list(operation.inputs)
        if operation.name == "scan":
            # A loop makes its zeros anew in each iteration.
            begin, _ = operation.carry
            consts = [v for v in read[:begin] if v not in generated]
            read = consts + read[begin:]
        written.update(_at_home(read, homes), _at_home(operation.outputs, homes))
    written.update(_at_home(program.outputs, homes))
    return {value for value in written if value.bytes >= SMALL}


def _made(
    program: Program, homes: Homes, written: Set[Value], generated: Set[Value]
) -> dict[Value, int]:
    """Written value -> the operation that first holds it."""
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
    """Written value -> the last operation that reads it, through all it fuses."""
    last: dict[Value, int] = {}
    sources: dict[Value, Set[Value]] = {}

    def needs(values: Iterable[Value | None]) -> Set[Value]:
        needed: set[Value] = set()
        for value in values:
            if value is None:
                continue
            home = homes.get(value, value)
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
