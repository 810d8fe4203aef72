"""Counts the FLOPs of a model's matrix products from its trace of forward."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from fsdp_jax._scopes import FLASH_FORWARD, part_of_rows
from fsdp_jax.planner.liveness._operations import Operation, Program, Value

_RAGGED = ("ragged_dot", "ragged_dot_general")


class Provenance(enum.IntEnum):
    """What an array is made of; of several origins the last one counts."""

    DATA = 0
    FROZEN = 1
    TRAINED = 2


def product_flops(program: Program) -> float:
    """Returns the FLOPs of all matrix products of a traced program, loops unrolled.

    Attention counts as full, causal or not, and rows that pad those of experts do not
    count. A loop with an unknown number of iterations counts as one iteration, a
    conditional as its costliest branch.

    Args:
      program: Traced program in the shapes of one device, e.g. a model's forward.
    """
    return training_flops(program, [Provenance.DATA] * len(program.inputs))


def training_flops(program: Program, origins: Sequence[Provenance]) -> float:
    """Returns the FLOPs of a program, and of backward without recomputation.

    In backward a product of which the result depends on a trained parameter is one
    product for each of its operands, but for those that frozen parameters alone have
    made. Data counts as an operand: 6 FLOPs a weight and token is the convention, also
    of the first layer.

    Args:
      program: Forward, as for `product_flops`.
      origins: Provenance of each input.
    """
    return _walk(program, origins)[0]


def _walk(
    program: Program, origins: Sequence[Provenance]
) -> tuple[float, list[Provenance]]:
    """Returns the FLOPs of a program, and the origin of each result."""
    known: dict[Value | None, Provenance] = {}
    known.update(zip(program.inputs, origins, strict=True))
    flops = 0.0
    for operation in program.operations:
        read = [known.get(value, Provenance.DATA) for value in operation.inputs]
        if operation.bodies:
            within, made = _walk_bodies(operation, read)
        else:
            made = [max(read, default=Provenance.DATA)] * len(operation.outputs)
            within = _flops(operation) * (1 + _products_in_backward(operation, read))
        flops += within
        known.update(zip(operation.outputs, made, strict=True))
    return flops, [known.get(value, Provenance.DATA) for value in program.outputs]


def _walk_bodies(
    operation: Operation, read: list[Provenance]
) -> tuple[float, list[Provenance]]:
    """Returns the FLOPs of a loop or a conditional, and the origins of its results."""
    begin, end = operation.carry
    while True:  # Until what a loop carries is made of what its body returns.
        found = [_walk(body, _last(read, body)) for body in operation.bodies]
        made = [max(of) for of in zip(*(own for _, own in found), strict=True)]
        carry = [max(of) for of in zip(read[begin:end], made, strict=False)]
        if carry == read[begin:end]:
            break
        read[begin:end] = carry
    times = operation.params["length"] if operation.name == "scan" else 1
    return times * max(flops for flops, _ in found), made


def _last(read: Sequence[Provenance], body: Program) -> list[Provenance]:
    """Returns the origins of a body's inputs, which are the last of those around it."""
    missing = [Provenance.DATA] * (len(body.inputs) - len(read))
    return [*missing, *read[max(len(read) - len(body.inputs), 0) :]]


def _products_in_backward(operation: Operation, read: Sequence[Provenance]) -> int:
    if max(read, default=Provenance.DATA) is not Provenance.TRAINED:
        return 0
    if _is_attention(operation):
        return 2
    return sum(origin is not Provenance.FROZEN for origin in read[:2])


def _is_attention(operation: Operation) -> bool:
    return operation.name.startswith(("dot_product_attention_fwd", "pallas_call"))


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
    return 0.0


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
