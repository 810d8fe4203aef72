"""The order in which XLA runs the body of a loop whose tokens travel over `tp`."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from fsdp_jax.planner.liveness._operations import MOVE, Operation, Program, Value


def as_run(body: Program, loop: Operation, weights: Set[tuple[int, ...]]) -> Program:
    """A body with the gradients of weights behind all that needs none of them.

    Nothing that comes next can be computed while tokens travel. XLA's scheduler keeps
    these products back for then, those of one layer until the next, where the loop is
    unrolled; and what they read, the tokens of all ranks, stays in memory.

    Args:
      body: Of a loop; one in which nothing travels is left as it is.
      loop: The loop.
      weights: Dims of weights, sorted: products transpose some.
    """
    if not any(operation.name == MOVE for operation in body.operations):
        return body
    if loop.params.get("unroll", 1) > 1:
        body = _twice(body, loop.carry)
    late: set[Value] = set()
    first, last = [], []
    for operation in body.operations:
        is_gradient = operation.name == "dot_general" and (
            tuple(sorted(operation.outputs[0].shape)) in weights
        )
        if is_gradient or late.intersection(operation.inputs):
            late.update(operation.outputs)
            last.append(operation)
        else:
            first.append(operation)
    return dataclasses.replace(body, operations=(*first, *last))


def _twice(body: Program, carry: tuple[int, int]) -> Program:
    """Two iterations as one, which reads two slices and stacks two results."""
    begin, end = carry
    slices = tuple(_another(value) for value in body.inputs[end:])
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
    """One of the same shape: values are told apart by identity."""
    return dataclasses.replace(value)
