"""Finds weights kept for backward that the plan says to gather again.

The number of gathers does not show it, since backward may not need a weight's value.
So the check looks for the kept weight itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set

from fsdp_jax._scopes import is_recomputed, is_transposed, unit_of, units_in
from fsdp_jax.audit._check_collectives import canonical, key_of
from fsdp_jax.audit._expected import ExpectedCollective, dims_of
from fsdp_jax.audit._mismatch import Difference, array, named
from fsdp_jax.hlo._parse import Computation, Instruction
from fsdp_jax.hlo._program import CommunicatedArray, Dims, Program, loops
from fsdp_jax.sharding._plan import ROOT, ParamPlan, Plan

FIX = (
    "FSDPConfig(reshard_after_forward=True) in the plan that the step was made with; "
    "gather in fsdp.unit or fsdp.scan, not before them"
)
PLAN = "it is gathered again for backward (reshard_after_forward=True)"

VIEWS = (
    *("get-tuple-element", "bitcast", "copy", "reshape", "transpose", "convert"),
    *("slice", "copy-start", "copy-done"),
)
"""Opcodes whose result still holds the weight."""


def kept(
    plan: Plan,
    program: Program,
    arrays: Sequence[CommunicatedArray],
    expected: Sequence[ExpectedCollective],
    num_microbatches: int,
) -> Iterator[Difference]:
    """Yields matrices of units that stay unsharded from forward to backward."""
    gathers = [
        planned
        for planned in expected
        if planned.kind == "gather"
        and planned.param.unit_policy.reshard
        and planned.param.unit != ROOT
        if planned.param.ndim_in_unit > 1
    ]
    pieces = {
        canonical(dims) for param in plan.param_plans for dims in _stored(plan, param)
    }
    yield from _stacks(program, arrays, gathers, num_microbatches, pieces)
    if not program.is_cpu:  # XLA:CPU merges equal gathers outside of loops.
        yield from _singles(arrays, gathers, plan.config.prefetch)


def _stacks(
    program: Program,
    arrays: Sequence[CommunicatedArray],
    gathers: Sequence[ExpectedCollective],
    num_microbatches: int,
    pieces: Set[Dims],
) -> Iterator[Difference]:
    """Yields unsharded stacks that a loop carries and that are gathered only once.

    Layers with several values of `static` run in one loop for each run of equal ones,
    so a stack may be of fewer layers. Stacks with the dims of a parameter's shard
    (`pieces`) are skipped: loops carry those by design.
    """
    carried = [shape for one in loops(program) for shape in one.shapes]
    for planned in gathers:
        stacks = _stacks_of(planned)
        sizes = {canonical(dims): num_layers for num_layers, dims in stacks.items()}
        found = [x for x in carried if canonical(x.dims) in sizes.keys() - pieces]
        if not found:
            continue
        buffer = next((x for x in found if x.dims in stacks.values()), found[0])
        num_layers = sizes[canonical(buffer.dims)]
        are_all = num_layers == planned.param.shape[0]
        whose = "all layers'" if are_all else f"{num_layers} layers'"
        alike = {x.param for x in gathers if key_of(x) == key_of(planned)}
        once = sum(math.prod(param.shape[: param.num_stacked]) for param in alike)
        times = sum(one.times for one in arrays if key_of(one) == key_of(planned))
        # With more gathers than that, backward gathers again, and the carried array is
        # another one of the same dims.
        if times <= num_microbatches * once:
            yield Difference(
                named([planned.param]),
                PLAN,
                f"carries {array(buffer.dtype, buffer.dims)} through a loop, {whose} "
                f"unsharded weights, and gathers {times} times a step",
                FIX,
            )


def _stored(plan: Plan, param: ParamPlan) -> list[Dims]:
    """Returns the dims of a shard, and those of stacks of fewer layers of it."""
    dims = dims_of(plan, param, param.placements.parameter, sliced=False)
    if not param.num_stacked:
        return [dims]
    return [(n, *dims[1:]) for n in range(1, dims[0] + 1)]


def _stacks_of(planned: ExpectedCollective) -> dict[int, Dims]:
    """Returns the dims of unsharded stacks by their number of layers, most first."""
    param = planned.param
    if not param.num_stacked:
        return {}
    inner = (*param.shape[1 : param.num_stacked], *planned.received)
    return {n: (n, *inner) for n in range(param.shape[0], 1, -1)}


def _singles(
    arrays: Sequence[CommunicatedArray],
    gathers: Sequence[ExpectedCollective],
    prefetch: int,
) -> Iterator[Difference]:
    """Yields gathers in forward whose result an instruction of backward reads.

    Backward begins with the `prefetch` units that forward ended with: what these read
    stays, whichever unit it was gathered for.
    """
    by_key: dict[object, list[ParamPlan]] = {}
    for planned in gathers:
        if not planned.param.num_stacked:
            by_key.setdefault(key_of(planned), []).append(planned.param)
    found: list[tuple[list[ParamPlan], list[Instruction]]] = []
    for one in arrays:
        if key_of(one) not in by_key or _is_backward(one.scope):
            continue
        weight = result_of(one)
        units = _units(weight.op_name) or _units(one.scope)
        own = [param for param in by_key[key_of(one)] if param.unit in units]
        readers = [*_readers_in_backward(one.computation, weight)] if own else []
        if readers:
            found.append((own, readers))
    if len(_reading_units(found)) <= prefetch:
        return
    for own, readers in found:
        yield Difference(
            named(own),
            PLAN,
            f"reads the weight that forward gathered in backward "
            f"({readers[0].opcode} {readers[0].name})",
            FIX,
        )


def _reading_units(
    found: Sequence[tuple[list[ParamPlan], list[Instruction]]],
) -> set[str]:
    """Returns units whose backward reads kept weights: at least one for each weight."""
    each = [
        {unit_of(reader.op_name) or own[0].unit for reader in readers}
        for own, readers in found
    ]
    units: set[str] = set()
    for reading in sorted(each, key=len):
        if not reading & units:
            units.add(min(reading))
    return units


def result_of(one: CommunicatedArray) -> Instruction:
    """Returns the gathered array, behind `-done` and `get-tuple-element`."""
    result, within = one.instruction, one.computation
    for reader in within.readers.get(result.name, []):
        if reader.opcode.endswith("-done"):
            result = reader
    for reader in within.readers.get(result.name, []):
        if reader.opcode == "get-tuple-element" and reader.index == one.index:
            return reader
    return result


def _readers_in_backward(
    within: Computation, weight: Instruction
) -> Iterator[Instruction]:
    """Yields instructions of backward that read the weight or a view of it."""
    open_, seen = [weight], {weight.name}
    while open_:
        for reader in within.readers.get(open_.pop().name, []):
            if reader.name in seen:
                continue
            seen.add(reader.name)
            if reader.opcode in VIEWS:
                open_.append(reader)
            elif reader.opcode != "tuple" and _is_backward(reader.op_name):
                yield reader
            # A fusion with as many elements may return the weight, e.g. converted.
            elif reader.opcode == "fusion" and size_of(reader) == size_of(weight):
                open_.append(reader)


def size_of(one: Instruction) -> int:
    return sum(shape.num_elements for shape in one.shapes)


def _is_backward(scope: str) -> bool:
    return is_transposed(scope) or is_recomputed(scope)


def _units(scope: str) -> set[str]:
    return set(units_in(scope))
