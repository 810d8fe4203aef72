"""Pushes slices over `tp` up into the operations that make the sliced value."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from fsdp_jax.planner.liveness._operations import SLICE, Operation, Value

MADE_IN_PARTS = {
    "scatter-add",
    "broadcast_in_dim",
    "convert_element_type",
    "mul",
    "div",
    "add_any",
}
"""Primitives that can compute one part alone, as for an embedding's gradient."""


def made_in_parts(
    operations: Sequence[Operation], outputs: Sequence[Value | None]
) -> list[Operation]:
    """Returns the operations with slices over `tp` as early as possible."""
    read = [value for operation in operations for value in operation.inputs]
    readers = collections.Counter([*read, *outputs])
    makers = {v: operation for operation in operations for v in operation.outputs}
    parts: dict[Value, Value] = {}
    pending, found = list(operations), []
    while pending:
        # Backwards, so that a slice comes before the operation that makes its operand.
        operation = pending.pop()
        if operation.name == SLICE:
            (full,), (part,) = operation.inputs, operation.outputs
            assert full is not None
            maker = makers.get(full)
            # With other readers the whole value is needed anyway.
            if maker and maker.name in MADE_IN_PARTS and readers[full] == 1:
                parts[full] = part
                continue
        made = next(iter(operation.outputs), None)
        if made in parts:
            operation, slices = _of_part(operation, parts[made])
            pending += slices
        found.append(operation)
    return found[::-1]


def _of_part(operation: Operation, part: Value) -> tuple[Operation, list[Operation]]:
    """Returns the operation for one part, and the slices of its operands."""
    (made,) = operation.outputs
    inputs, slices = [], []
    for value in operation.inputs:
        if value is not None and value.shape == made.shape:
            full, value = value, dataclasses.replace(value, shape=part.shape)
            slices.append(Operation(SLICE, (full,), (value,), operation.scopes))
        inputs.append(value)
    changed = dataclasses.replace(operation, inputs=tuple(inputs), outputs=(part,))
    return changed, slices
