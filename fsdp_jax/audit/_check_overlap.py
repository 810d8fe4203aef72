"""Finds collectives of scanned units that no computation overlaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_jax.audit._check_collectives import matches
from fsdp_jax.audit._expected import ExpectedCollective
from fsdp_jax.audit._mismatch import Difference, named_collectives, observed
from fsdp_jax.hlo._parse import Computation, Instruction
from fsdp_jax.hlo._program import CommunicatedArray, Program
from fsdp_jax.planner._cost import FREE, product_flops


def exposed(
    program: Program,
    arrays: Sequence[CommunicatedArray],
    expected: Sequence[ExpectedCollective],
    num_microbatches: int,
) -> Iterator[Difference]:
    """Yields exposed gathers and reductions in loops over layers.

    Collectives outside of these loops, such as the first gather, have no computation to
    overlap with and are skipped.
    """
    stacked = [
        planned
        for planned in expected
        if planned.param.num_stacked and planned.kind in ("gather", "reduce")
    ]
    seen = set()
    for one in arrays:
        found = matches(one, stacked)
        # A collective in the loop over microbatches alone runs `num_microbatches`
        # times.
        is_in_layers = one.loops and one.times > num_microbatches
        if not found or not is_in_layers or one.instruction.name in seen:
            continue
        seen.add(one.instruction.name)
        if problem := _problem(program, one):
            yield Difference(
                f"{named_collectives(found, one)}, {one.instruction.name}",
                "its loop hides collectives behind computation (overlapped=True)",
                f"{observed(one)}, {problem}",
                "FSDPConfig(prefetch=1), scan(unroll=2), and the compiler options "
                "of the latency-hiding scheduler",
            )


def _problem(program: Program, one: CommunicatedArray) -> str | None:
    """Returns why a collective is exposed, or None if computation overlaps it."""
    start, within = one.instruction, one.computation
    done = [r for r in within.readers.get(start.name, []) if r.opcode.endswith("-done")]
    if not done or '"is_sync":true' in start.attributes:
        return "which is waited for at once"
    order = within.instructions
    between = order[order.index(start) + 1 : order.index(done[0])]
    wanted = [i for i in order if _multiplies(program, within, i)]
    # In a computation without matrix products any other work counts.
    beside = [i for i in between if i in wanted] if wanted else _computing(between)
    return None if beside else "with no matrix product between its start and its end"


def _multiplies(program: Program, within: Computation, one: Instruction) -> bool:
    return product_flops(program.module, within, one)[0] > 0


def _computing(instructions: Sequence[Instruction]) -> list[Instruction]:
    quiet = ("-start", "-done", "-update")
    return [
        i for i in instructions if i.opcode not in FREE and not i.opcode.endswith(quiet)
    ]
