"""A lowered or compiled program, and the arrays that it communicates."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from fsdp_jax._scopes import merged_units
from fsdp_jax.hlo._collectives import axes_of, collective_of
from fsdp_jax.hlo._parse import Computation, Instruction, Module, parse
from fsdp_jax.hlo._walk import walk

Dims = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A parsed module with facts that are not in its text.

    Attributes:
      module: Parsed module.
      is_lowered: Whether the program is not compiled; arguments have global shapes
        then.
      is_cpu: Whether it was compiled for CPUs, where XLA widens the dtypes of
        collectives and merges equal gathers.
      is_scheduled: Whether the instructions are in execution order.
      results: `(path, dims on one device)` of each result; empty if unknown.
      result_shapes: `(path, shape on all devices)` of each result, also of a lowered
        program; empty if unknown.
    """

    module: Module
    is_lowered: bool
    is_cpu: bool
    is_scheduled: bool = False
    results: tuple[tuple[str, Dims], ...] = ()
    result_shapes: tuple[tuple[str, Dims], ...] = ()

    @property
    def is_scheduled_for_gpus(self) -> bool:
        """Whether the schedule shows which computation overlaps a collective."""
        return self.is_scheduled and not self.is_cpu


@dataclasses.dataclass(frozen=True)
class CommunicatedArray:
    """One array of one collective.

    Attributes:
      op: Opcode, e.g. `all-gather`.
      dtype: Dtype, as HLO writes it.
      sent: Dims of the array that each device sends.
      received: Dims of the array that each device receives.
      axes: Mesh axes of the replica groups; None if they lie along none.
      times: Runs per step; a loop of unknown length counts as one iteration.
      loops: Names of the enclosing loops, outermost first.
      scope: Path of the jax scopes, with the callers' scopes first.
      computation: Computation of the instruction.
      instruction: Instruction that runs or starts the collective.
      index: Position of the array among the arrays of the collective.
      is_in_order: Whether the dims are in the model's order; XLA for GPUs permutes
        them.
      is_in_branch: Whether the collective is inside a conditional, which some devices
        may skip.
    """

    op: str
    dtype: str
    sent: Dims
    received: Dims
    axes: tuple[str, ...] | None
    times: int
    loops: tuple[str, ...]
    scope: str
    computation: Computation
    instruction: Instruction
    index: int
    is_in_order: bool
    is_in_branch: bool

    @property
    def unit(self) -> str | None:
        """Innermost unit in the scope; None if there is none or XLA merged several."""
        found = merged_units(self.scope)
        return found.pop() if len(found) == 1 else None

    @property
    def elements(self) -> int:
        """Number of elements of the larger side."""
        return max(math.prod(self.sent), math.prod(self.received))


def program_of(compiled: Any, mesh: Mesh) -> Program:
    """Parses the `compiled` argument of `audit_step`.

    Args:
      compiled: `jax.stages.Lowered`, `jax.stages.Compiled`, or the text of a module.
      mesh: Device mesh that the program was made for.

    Raises:
      TypeError: If `compiled` is none of these.
      ValueError: If the text is not HLO.
    """
    is_cpu = all(device.platform == "cpu" for device in mesh.devices.flat)
    if isinstance(compiled, jax.stages.Lowered):
        computation: Any = compiled.compiler_ir(dialect="hlo")
        text = computation.get_hlo_module().to_string()
        shapes = _shapes(compiled)
        return Program(parse(text), True, is_cpu=False, result_shapes=shapes)
    results: tuple[tuple[str, Dims], ...] = ()
    shapes: tuple[tuple[str, Dims], ...] = ()
    text = compiled
    if isinstance(compiled, jax.stages.Compiled):
        text, results = compiled.as_text(), tuple(_results(compiled))
        shapes = _shapes(compiled)
    if isinstance(text, str):
        is_scheduled = "is_scheduled=true" in text.partition("\n")[0]
        return Program(parse(text), False, is_cpu, is_scheduled, results, shapes)
    raise TypeError(
        f"audit takes what step.lower(...) or its .compile() returns, or the text of "
        f"a compiled module, not a {type(compiled).__name__}."
    )


def communicated_arrays(program: Program, mesh: Mesh) -> Iterator[CommunicatedArray]:
    """Yields every array of every executed collective between two or more devices."""
    is_in_order = program.is_lowered or program.is_cpu
    for run in walk(program.module):
        found = collective_of(program.module, run.computation, run.instruction)
        # A group of one device communicates nothing.
        if not found or found.group_size == 1:
            continue
        axes = axes_of(found.groups, mesh)
        pairs = list(zip(found.sent, found.received, strict=False))
        if found.op == "all-to-all" and len(pairs) > 1:
            # A tuple all-to-all has one operand per device of the group: count it once.
            size = sum(sent.num_elements for sent, _ in pairs)
            dims: list[tuple[str, Dims, Dims]] = [(pairs[0][0].dtype, (size,), (size,))]
        else:
            dims = [(a.dtype, a.dims, b.dims) for a, b in pairs]
        for index, (dtype, sent, received) in enumerate(dims):
            yield CommunicatedArray(
                op=found.op,
                dtype=dtype,
                sent=sent,
                received=received,
                axes=axes,
                times=run.times,
                loops=run.loops,
                scope=run.scope,
                computation=run.computation,
                instruction=run.instruction,
                index=index,
                is_in_order=is_in_order,
                is_in_branch=run.is_in_branch,
            )


def loops(program: Program) -> Iterator[Instruction]:
    """Yields every executed `while` instruction."""
    for run in walk(program.module):
        if run.instruction.opcode == "while":
            yield run.instruction


def arguments(program: Program) -> Iterator[tuple[str, Dims]]:
    """Yields `(path, dims on one device)` of each named argument."""
    entry = program.module[program.module.entry]
    for instruction in entry.parameters.values():
        path = instruction.op_name.replace("\\'", "'")
        if path and instruction.shapes:
            dims = instruction.shapes[0].dims
            if program.is_lowered:
                counts = _num_shards(instruction, len(dims))
                dims = tuple(d // n for d, n in zip(dims, counts, strict=True))
            yield path, dims


def _num_shards(instruction: Instruction, ndim: int) -> Dims:
    """Returns the number of shards in each dim of a lowered argument."""
    found = re.search(r"sharding=\{devices=\[([\d,]+)\]", instruction.attributes)
    counts = [int(n) for n in found[1].split(",")] if found else []
    # Behind the dims HLO may list a count of replicas, or nothing at all.
    return tuple([*counts, *[1] * ndim][:ndim])


def _results(compiled: jax.stages.Compiled) -> Iterator[tuple[str, Dims]]:
    for path, struct in _named(compiled):
        sharding = getattr(struct, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding):
            yield path, tuple(sharding.shard_shape(struct.shape))


def _shapes(
    stage: jax.stages.Lowered | jax.stages.Compiled,
) -> tuple[tuple[str, Dims], ...]:
    return tuple((path, tuple(struct.shape)) for path, struct in _named(stage))


def _named(stage: jax.stages.Lowered | jax.stages.Compiled) -> list[tuple[str, Any]]:
    """Returns the path of each result of a program, with its shape and sharding."""
    structs = jax.tree_util.tree_flatten_with_path(stage.out_info)[0]
    return [(jax.tree_util.keystr(path), struct) for path, struct in structs]
