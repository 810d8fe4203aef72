"""Walks the instructions of an HLO module as they are executed, loops included."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from fsdp_jax.hlo._parse import Computation, Instruction, Module


class Executed(NamedTuple):
    """An instruction, with what is known of its executions.

    Attributes:
      computation: Computation of the instruction.
      instruction: Instruction.
      times: Executions in a run of the module; a loop of unknown length counts as one
        iteration.
      loops: Names of the enclosing loops, outermost first.
      scope: Path of the jax scopes, with the callers' scopes first.
      is_in_branch: Whether it is inside a conditional, which some devices may skip.
    """

    computation: Computation
    instruction: Instruction
    times: int = 1
    loops: tuple[str, ...] = ()
    scope: str = ""
    is_in_branch: bool = False


def walk(module: Module) -> Iterator[Executed]:
    """Yields every instruction that runs, in the order of the text.

    The instructions inside fusions are not visited.
    """
    entry = module[module.entry]
    yield from _walk(module, Executed(entry, entry.root))


def _walk(module: Module, caller: Executed) -> Iterator[Executed]:
    """Yields the instructions of `caller.computation` and of those that it calls."""
    for instruction in caller.computation.instructions:
        run = caller._replace(
            instruction=instruction, scope=_scope(caller.scope, instruction)
        )
        yield run
        if instruction.opcode == "while":
            body = run._replace(
                computation=module[instruction.calls[0]],
                times=run.times * _trips(module, instruction),
                loops=(*run.loops, instruction.name),
            )
            yield from _walk(module, body)
        elif instruction.opcode in ("call", "conditional"):
            may_skip = run.is_in_branch or instruction.opcode == "conditional"
            for name in instruction.calls:
                inner = run._replace(computation=module[name], is_in_branch=may_skip)
                yield from _walk(module, inner)


def _scope(around: str, instruction: Instruction) -> str:
    # In a lowered program op names are relative to the enclosing function.
    is_absolute = instruction.op_name.lstrip("(").startswith("jit(")
    return (
        instruction.op_name
        if is_absolute
        else f"{around}/{instruction.op_name}".strip("/")
    )


def _trips(module: Module, instruction: Instruction) -> int:
    """Returns the number of iterations of a loop; 1 if unknown.

    In a lowered program the number is only in the loop's condition.
    """
    if instruction.trip_count is not None:
        return instruction.trip_count
    named = re.search(r"condition=%?([\w.\-]+)", instruction.attributes)
    if not named:
        return 1
    condition = module[named[1]]
    # jax's counted loops compare `i < limit`, with a constant limit.
    if condition.root.opcode != "compare" or "LT" not in condition.root.attributes:
        return 1
    limits = [condition.by_name[name] for name in condition.root.operands]
    known = [c.operands[0] for c in limits if c.opcode == "constant"]
    return int(known[0]) if known and known[0].isdigit() else 1
