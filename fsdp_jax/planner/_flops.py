"""Counts the FLOPs of a model's matrix products from its trace."""

from __future__ import annotations

import math

from fsdp_jax._scopes import FLASH_FORWARD, part_of_rows
from fsdp_jax.planner.liveness._operations import Operation, Program

_RAGGED = ("ragged_dot", "ragged_dot_general")


def product_flops(program: Program) -> float:
    """Returns the FLOPs of all matrix products of a traced program, loops unrolled.

    Attention counts as full, causal or not, and rows that pad those of experts do not
    count. A loop with an unknown number of iterations counts as one iteration, a
    conditional as its costliest branch.

    Args:
      program: Traced program in the shapes of one device, e.g. a model's forward.
    """
    return sum(_flops(operation) for operation in program.operations)


def _flops(operation: Operation) -> float:
    if operation.name == "dot_general":
        return _dot_general(operation) * part_of_rows(operation.scopes)
    if operation.name in _RAGGED:
        return _ragged_dot(operation) * part_of_rows(operation.scopes)
    if operation.name == "conv_general_dilated":
        return _convolution(operation)
    if operation.name.startswith("dot_product_attention_fwd"):
        return _attention(operation)
    if operation.name == "pallas_call":
        return _attention(operation) if FLASH_FORWARD in _kernel_name(operation) else 0
    within = [product_flops(body) for body in operation.bodies]
    times = operation.params["length"] if operation.name == "scan" else 1
    return times * max(within, default=0.0)


def _dot_general(operation: Operation) -> float:
    (contracted, _), _ = operation.params["dimension_numbers"]
    left = operation.inputs[0]
    assert left is not None
    depth = math.prod(left.shape[dim] for dim in contracted)
    return 2.0 * math.prod(operation.outputs[0].shape) * depth


def _ragged_dot(operation: Operation) -> float:
    """Returns the FLOPs of rows by a matrix of the group that each is in."""
    dims = operation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = dims.dot_dimension_numbers
    rows = operation.inputs[0]
    assert rows is not None
    if dims.lhs_ragged_dimensions[0] in contracted:  # each row is in one product
        return 2.0 * math.prod(rows.shape) * operation.outputs[0].shape[-1]
    depth = math.prod(rows.shape[dim] for dim in contracted)
    return 2.0 * math.prod(operation.outputs[0].shape) * depth


def _convolution(operation: Operation) -> float:
    kernel = operation.inputs[1]
    assert kernel is not None
    out_dim = operation.params["dimension_numbers"].rhs_spec[0]
    # Multiply-adds per element of the result.
    a_result = math.prod(kernel.shape) / kernel.shape[out_dim]
    return 2.0 * math.prod(operation.outputs[0].shape) * a_result


def _attention(operation: Operation) -> float:
    """Returns the FLOPs of two products: queries by keys, and that by values."""
    query, key, value = operation.inputs[:3]
    assert query is not None and key is not None and value is not None
    batch, length, heads, width = query.shape
    widths = width + value.shape[-1]
    return 2.0 * batch * heads * length * key.shape[1] * widths


def _kernel_name(operation: Operation) -> str:
    # jax 0.10 and 0.12 have it in either.
    names = (operation.params.get(key, "") for key in ("name", "name_and_src_info"))
    return " ".join(map(str, names))
