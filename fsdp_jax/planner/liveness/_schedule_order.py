"""XLA's order of operations in loop bodies that communicate tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from fsdp_jax._scopes import EXPERT_DISPATCH, is_in
from fsdp_jax.planner.liveness._operations import MOVE, Operation, Program, Value

PRODUCTS = {"dot_general", "ragged_dot_general", "while", "scan"}
"""Primitives of products, with the loops over blocks of rows of grouped ones."""


def _is_exchange(operation: Operation) -> bool:
    """Returns whether an operation sends tokens to experts of other ranks, or back."""
    is_sent = operation.name in ("all_to_all", "ragged_all_to_all")
    return is_sent and is_in(operation.scopes, EXPERT_DISPATCH)


def as_run(body: Program, loop: Operation, weights: Set[tuple[int, ...]]) -> Program:
    """Moves weight gradients behind operations that do not need them.

    The next operation of a layer cannot run while its tokens are communicated over
    `tp`, or sent to experts of other ranks. XLA's scheduler delays the products of
    weight gradients to overlap with that, in an unrolled loop those of one layer into
    the next. What they read, the tokens of all ranks, stays in memory.

    | tokens are communicated | weight gradients run |
    |---|---|
    | over `tp`, around each product | after all else |
    | to experts, a few times a layer | after the next exchange of tokens |

    Args:
      body: Loop body; returned unchanged if it communicates no tokens.
      loop: Operation of the loop.
      weights: Sorted dims of weights; sorted since products transpose some weights.
    """
    over_tp = any(operation.name == MOVE for operation in body.operations)
    if not over_tp and not any(map(_is_exchange, body.operations)):
        return body
    if loop.params.get("unroll", 1) > 1:
        body = _twice(body, loop.carry)
    after_gradients: set[Value] = set()
    found, late = [], []
    for operation in body.operations:
        is_gradient = operation.name in PRODUCTS and any(
            tuple(sorted(made.shape)) in weights for made in operation.outputs
        )
        if is_gradient or after_gradients.intersection(operation.inputs):
            after_gradients.update(operation.outputs)
            late.append(operation)
            continue
        found.append(operation)
        if _is_exchange(operation) and not over_tp:
            found += late
            after_gradients, late = set(), []
    return dataclasses.replace(body, operations=(*found, *late))


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
