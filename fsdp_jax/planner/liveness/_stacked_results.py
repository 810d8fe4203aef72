"""When the results that a loop stacks are in its stacks."""

from __future__ import annotations

import dataclasses

from fsdp_jax._scopes import unit_of
from fsdp_jax.planner.liveness._operations import Operation, Program


def stacked_early(body: Program, loop: Operation) -> Program:
    """Leaves out the results of a body that are in their stacks before it ends.

    XLA writes a result into its stack once it is made. Where the body runs several
    units, one after the other, those of all but the last are there by then.

    Args:
      body: Loop body; returned unchanged unless it is that of a scan and runs several
        units.
      loop: Operation of the loop.
    """
    units = [unit_of(operation.scopes) for operation in body.operations]
    last = next((unit for unit in reversed(units) if unit), None)
    if loop.name != "scan" or len({*units} - {None}) < 2:
        return body
    early = {
        value
        for operation, unit in zip(body.operations, units, strict=True)
        if unit not in (None, last)
        for value in operation.outputs
    }
    begin, end = loop.carry
    stacked = body.outputs[end - begin :]
    kept = (None if value in early else value for value in stacked)
    return dataclasses.replace(body, outputs=(*body.outputs[: end - begin], *kept))
