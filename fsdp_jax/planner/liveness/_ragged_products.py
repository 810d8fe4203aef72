"""The dense form of grouped products by `jax.lax.ragged_dot`, which XLA has on GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fsdp_jax.planner.liveness._operations import Operation, Value

RAGGED_DOT = "ragged_dot_general"

EXPAND = "expand_by_group"
"""Operation that copies rows once per group, with zeros in the rows of other groups."""


def with_dense_forms(operations: Sequence[Operation]) -> list[Operation]:
    """Returns the operations with the rows of each group that grouped products read.

    | rows are | operands in memory |
    |---|---|
    | summed, for the gradient of weights | `(groups, rows, width)` |
    | those of the result | the same, and transposed: `(rows, groups, width)` |

    Products of the same rows share the first array, which so lives from the recomputed
    forward pass until the gradient of the weights. A single group needs neither.

    Args:
      operations: Operations in the order in which they run.
    """
    found: list[Operation] = []
    dense: dict[tuple[Value, Value], Value] = {}
    for operation in operations:
        if operation.name != RAGGED_DOT or _num_groups(operation) == 1:
            found.append(operation)
            continue
        lhs, rhs, sizes, *rest = operation.inputs
        assert lhs is not None and rhs is not None and sizes is not None
        is_over_rows = not _numbers(operation).rhs_group_dimensions
        read = [lhs, rhs] if is_over_rows else [lhs]
        for rows in read:
            if (rows, sizes) not in dense:
                value = _with_groups(rows, _num_groups(operation), 0)
                dense[rows, sizes] = value
                found.append(Operation(EXPAND, (rows,), (value,), operation.scopes))
        made = [dense[rows, sizes] for rows in read]
        if not is_over_rows:
            turned = _with_groups(lhs, _num_groups(operation), 1)
            found.append(Operation(EXPAND, (made[0],), (turned,), operation.scopes))
            made = [turned, rhs]
        found.append(dataclasses.replace(operation, inputs=(*made, sizes, *rest)))
    return found


def _num_groups(operation: Operation) -> int:
    sizes = operation.inputs[2]
    return sizes.shape[-1] if sizes is not None else 1


def _numbers(operation: Operation):
    return operation.params["ragged_dot_dimension_numbers"]


def _with_groups(rows: Value, groups: int, at: int) -> Value:
    shape = (*rows.shape[:at], groups, *rows.shape[at:])
    return dataclasses.replace(rows, shape=shape)
