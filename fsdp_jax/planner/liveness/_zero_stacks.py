"""Stacks of zeros, which XLA does not keep.

The derivative of a `where`, or of a relu, chooses between a gradient and zeros. A loop
over layers that stacks what backward needs stacks these zeros as well. XLA writes
zeros into a stack that begins as zeros, and so knows the result.
"""

from __future__ import annotations

from collections.abc import Set

from fsdp_jax.planner.liveness._operations import ZEROS, Operation, Program, Value

_KEPT = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "reshape",
    "squeeze",
    "transpose",
}
"""Primitives that make zeros of zeros."""


def stacks_of_zeros(program: Program) -> Set[Value]:
    """Returns the stacks of zeros that the scans of a program make."""
    zeros = _zeros(program)
    scans = (one for one in program.operations if one.name == "scan")
    return set().union(*(_made_by(loop, zeros) for loop in scans))


def _made_by(loop: Operation, zeros: Set[Value]) -> Set[Value]:
    """Returns the results of a scan that are stacks of zeros, given those around it."""
    (body,), (begin, end) = loop.bodies, loop.carry
    consts = zip(body.inputs[:begin], loop.inputs[:begin], strict=True)
    inside = _zeros(body, {inner for inner, read in consts if read in zeros})
    num_carry = end - begin
    pairs = zip(loop.outputs[num_carry:], body.outputs[num_carry:], strict=True)
    return {made for made, result in pairs if result in inside}


def _zeros(program: Program, given: Set[Value] = frozenset()) -> Set[Value]:
    """Returns the values of a program that are zeros, `given` its inputs that are."""
    zeros = set(given)
    for operation in program.operations:
        is_kept = operation.name in _KEPT and operation.inputs[0] in zeros
        if operation.name == ZEROS or is_kept:
            zeros.update(operation.outputs)
        elif operation.name == "scan":
            zeros |= _made_by(operation, zeros)
    return zeros
