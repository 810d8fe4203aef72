"""XLA's order of operations in loop bodies with communication over `tp`."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from fsdp_jax.planner.liveness._operations import MOVE, Operation, Program, Value


def as_run(body: Program, loop: Operation, weights: Set[tuple[int, ...]]) -> Program:
    """Moves weight gradients behind the operations that do not need them.

    The next operation of a layer cannot run while its tokens are communicated over
    `tp`. XLA's scheduler delays the products of weight gradients to overlap with that,
    in an unrolled loop those of one layer into the next. What they read, the tokens of
    all ranks, stays in memory.

    Args:
      body: Loop body; returned unchanged if it communicates nothing over `tp`.
      loop: Operation of the loop.
      weights: Sorted dims of weights; sorted since products transpose some weights.
    """
    if not any(operation.name == MOVE for operation in body.operations):
        return body
    if loop.params.get("unroll", 1) > 1:
        body = _twice(body, loop.carry)
    after_gradients: set[Value] = set()
    first, last = [], []
    for operation in body.operations:
        is_gradient = operation.name == "dot_general" and (
            tuple(sorted(operation.outputs[0].shape)) in weights
        )
        if is_gradient or after_gradients.intersection(operation.inputs):
            after_gradients.update(operation.outputs)
            last.append(operation)
        else:
            first.append(operation)
    return dataclasses.replace(body, operations=(*first, *last))


def _twice(body: Program, carry: tuple[int, int]) -> Program:
    """Unrolls a body by two; it then reads two slices and stacks two results."""
    begin, end = carry
    slices = tuple(_another(value) for value in body.inputs[end:])
    # The second iteration reads the carry of the first one, and further slices.
    again: dict[Value | None, Value | None] = dict(
        zip(body.inputs[begin:], (*body.outputs[: end - begin], *slices), strict=True)
    )
    operations = list(body.operations)
    for operation in body.operations:
        inputs = tuple(again.get(value, value) for value in operation.inputs)
        outputs = tuple(_another(value) for value in operation.outputs)
        again |= dict(zip(operation.outputs, outputs, strict=True))
        operations.append(
            dataclasses.replace(operation, inputs=inputs, outputs=outputs)
        )
    outputs = tuple(again.get(value, value) for value in body.outputs)
    return Program(
        (*body.inputs, *slices),
        (*outputs, *body.outputs[end - begin :]),
        tuple(operations),
    )


def _another(value: Value) -> Value:
    """Copies a value: values are compared by identity."""
    return dataclasses.replace(value)
