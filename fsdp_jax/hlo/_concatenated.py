"""Finds the arrays and scopes of collectives that XLA for GPUs merged or named anew."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from fsdp_jax._scopes import is_of_optimizer
from fsdp_jax.hlo._parse import Computation, Instruction, Module
from fsdp_jax.hlo._program import CommunicatedArray

_VIEWS = ("bitcast", "reshape", "copy", "get-tuple-element")


def parts_of(module: Module, one: CommunicatedArray) -> Iterator[CommunicatedArray]:
    """Yields the arrays that a collective sends, with the scope of what made each.

    A merged collective has no scope of its own, or that of one of its arrays, so that
    what the optimizer sums or gathers cannot be told from gradients and weights by the
    collective alone.

    Args:
      module: Module of the program.
      one: Array of a collective; yielded as it is if it has a scope of its own.
    """
    operands = one.instruction.operands
    read = one.computation.by_name.get(operands[min(one.index, len(operands) - 1)])
    if read is None:
        yield one
        return
    if one.instruction.op_name:
        scope = _source(one.computation, read).op_name
        # Gradients are reduced before the optimizer runs; weights may be gathered from
        # what it wrote.
        is_merged = len(operands) > 1 and one.op != "all-gather"
        if is_merged and is_of_optimizer(scope):
            one = dataclasses.replace(one, scope=scope)
        yield one
        return
    parts = _operands(module, one.computation, read) if one.op == "all-reduce" else []
    sizes = [sum(math.prod(shape.dims) for shape in part.shapes) for part in parts]
    if sum(sizes) != one.elements:
        scope = _source(one.computation, read).op_name or one.scope
        yield dataclasses.replace(one, scope=scope)
        return
    for part, size in zip(parts, sizes, strict=True):
        scope = _source(one.computation, part).op_name or one.scope
        yield dataclasses.replace(one, sent=(size,), received=(size,), scope=scope)


def _operands(
    module: Module, computation: Computation, read: Instruction
) -> list[Instruction]:
    """Returns the operands of a concatenation, or of a fusion of one; else none."""
    if read.opcode == "concatenate":
        return [computation.by_name[name] for name in read.operands]
    if read.opcode != "fusion":
        return []
    fused = module[read.calls[0]]
    if fused.root.opcode != "concatenate":
        return []
    numbers = {one.name: number for number, one in fused.parameters.items()}
    sources = [_source(fused, fused.by_name[name]) for name in fused.root.operands]
    if not all(source.name in numbers for source in sources):
        return []
    return [computation.by_name[read.operands[numbers[one.name]]] for one in sources]


def _source(computation: Computation, one: Instruction) -> Instruction:
    """Returns the instruction that made an array, behind views of it."""
    while one.opcode in _VIEWS and one.operands[0] in computation.by_name:
        one = computation.by_name[one.operands[0]]
    return one
