"""Tracks the dims of a unit's weight through operations that move slices of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Dims = tuple[int | None, ...]
"""For each dim of an array the dim of the unit's weight that it is, complete and in
order; None for a stacked dim. `~d` is dim `d` reversed."""


def weight_dims(ndim: int, ndim_in_unit: int) -> Dims:
    """Returns the dims of `[*stacked, *unit]`, of `ndim` dims in all."""
    return (*(None,) * (ndim - ndim_in_unit), *range(ndim_in_unit))


def are_in_place(dims: Dims, ndim_in_unit: int) -> bool:
    """Returns whether each slice has the dims of the weight, in the unit's order."""
    return dims == weight_dims(len(dims), ndim_in_unit)


def moved(eqn: Any, dims: Dims) -> Dims | None:
    """Returns the dims of the result of an equation that only moves slices.

    Args:
      eqn: Equation of which the first operand, or any that it concatenates, is tracked.
      dims: Dims of that operand.

    Returns:
      The dims of the result; None if the equation moves elements within a slice or
      computes with them.
    """
    name = eqn.primitive.name
    if name in _KEEPS:
        return dims
    move = _MOVES.get(name)
    return move(eqn, dims) if move else None


def moves(eqn: Any) -> bool:
    """Returns whether an equation moves its operand, or parts of it."""
    return eqn.primitive.name in _KEEPS or eqn.primitive.name in _MOVES


def _broadcast(eqn: Any, dims: Dims) -> Dims | None:
    shape = eqn.params["shape"]
    new: list[int | None] = [None] * len(shape)
    places = eqn.params["broadcast_dimensions"]
    for dim, size, place in zip(dims, _shape(eqn), places, strict=True):
        # A dim of size 1 of the weight, repeated, is not a dim of the weight anymore.
        if dim is not None and size != shape[place]:
            return None
        new[place] = dim
    return tuple(new)


def _reshape(eqn: Any, dims: Dims) -> Dims | None:
    """Keeps a dim if its size, and the number of elements before it, are unchanged."""
    old, shape = _shape(eqn), eqn.params["new_sizes"]
    new: list[int | None] = [None] * len(shape)
    end = len(shape)
    # From the end: of several dims of size 1 the first are the stack's.
    for i in reversed([i for i, dim in enumerate(dims) if dim is not None]):
        places = [
            j
            for j in range(end)
            if shape[j] == old[i] and math.prod(shape[:j]) == math.prod(old[:i])
        ]
        if not places:
            return None
        end = places[-1]
        new[end] = dims[i]
    return tuple(new)


def _transpose(eqn: Any, dims: Dims) -> Dims:
    return tuple(dims[i] for i in eqn.params["permutation"])


def _squeeze(eqn: Any, dims: Dims) -> Dims | None:
    # A weight's dim of size 1 may not go either: the unit would miss it.
    gone = eqn.params["dimensions"]
    if _has_weight(dims, gone):
        return None
    return tuple(dim for i, dim in enumerate(dims) if i not in gone)


def _slice(eqn: Any, dims: Dims) -> Dims | None:
    # Of `slice` and `dynamic_slice`: start indices are not known, sizes are enough.
    sizes = eqn.outvars[0].aval.shape
    return dims if _are_all(dims, _shape(eqn), sizes) else None


def _gather(eqn: Any, dims: Dims) -> Dims | None:
    numbers = eqn.params["dimension_numbers"]
    if not _are_all(dims, _shape(eqn), eqn.params["slice_sizes"]):
        return None
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if _has_weight(dims, gone):
        return None
    # Offset dims of the result are the dims that are not collapsed, in order.
    kept = [dim for i, dim in enumerate(dims) if i not in gone]
    new: list[int | None] = [None] * len(eqn.outvars[0].aval.shape)
    for place, dim in zip(numbers.offset_dims, kept, strict=True):
        new[place] = dim
    return tuple(new)


def _rev(eqn: Any, dims: Dims) -> Dims:
    turned = eqn.params["dimensions"]
    return tuple(
        ~dim if dim is not None and i in turned else dim for i, dim in enumerate(dims)
    )


def _along(parameter: str) -> Callable[[Any, Dims], Dims | None]:
    """Makes the rule of a primitive that splits or concatenates along one dim."""

    def along(eqn: Any, dims: Dims) -> Dims | None:
        return None if _has_weight(dims, [eqn.params[parameter]]) else dims

    return along


# Primitives that leave all elements where they are.
_KEEPS = {
    *("convert_element_type", "copy", "name", "optimization_barrier"),
    *("reduce_precision", "sharding_constraint", "stop_gradient"),
}
# Primitives that move or slice an array, as maps and stacks do, without reading it.
_MOVES: dict[str, Callable[[Any, Dims], Dims | None]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _along("dimension"),
    "dynamic_slice": _slice,
    "gather": _gather,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "split": _along("axis"),
    "squeeze": _squeeze,
    "transpose": _transpose,
}


def _shape(eqn: Any) -> Sequence[int]:
    return eqn.invars[0].aval.shape


def _has_weight(dims: Dims, places: Any) -> bool:
    return any(dims[place] is not None for place in places)


def _are_all(dims: Dims, sizes: Sequence[int], taken: Sequence[int]) -> bool:
    """Returns whether each dim of the weight is taken completely."""
    triples = zip(dims, sizes, taken, strict=True)
    return all(dim is None or size == part for dim, size, part in triples)
