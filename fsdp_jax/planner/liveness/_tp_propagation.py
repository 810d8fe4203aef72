"""Propagates splits over `tp` through the operations of a traced program.

XLA partitions that axis, so the shapes of a trace are global over it. The splits of
weights, of constrained activations and of inner `shard_map`s are known, and are
propagated through the operations in between. An array has at most one split dim. None
means replicated, or that no rule applies, in which case memory is overestimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

AXIS = "tp"

Dim = int | None


def dim_of(spec: PartitionSpec) -> Dim:
    """Returns the dim that a spec splits over `tp`, or None."""
    for dim, axes in enumerate(spec):
        if axes == AXIS or (isinstance(axes, tuple) and AXIS in axes):
            return dim
    return None


def split_dims(eqn: Any, dims: Sequence[Dim], ranks: int) -> list[Dim]:
    """Returns the dims along which an equation's results are split.

    Args:
      eqn: Equation of a jaxpr that calls no other jaxpr.
      dims: Dims along which its arguments are split.
      ranks: Devices along `tp`; a dim that they do not divide counts as replicated.
    """
    rule = _RULES.get(eqn.primitive.name, _elementwise)
    found = []
    for at, made in enumerate(eqn.outvars):
        dim = rule(eqn, dims, made.aval.shape) if rule else dims[at]
        is_even = dim is not None and made.aval.shape[dim] % ranks == 0
        found.append(dim if is_even else None)
    return found


def read_dims(eqn: Any, dims: Sequence[Dim], made: Sequence[Dim]) -> list[Dim]:
    """Returns the dims along which an equation reads, given its results' dims.

    A replicated argument is sliced before it is combined with a split one.

    Args:
      eqn: Equation.
      dims: Dims along which its arguments are split.
      made: Dims along which its results are split.
    """
    rule = _RULES.get(eqn.primitive.name, _elementwise)
    dim = next(iter(made), None)
    if rule not in (_elementwise, _in_place) or dim is None:
        return list(dims)
    shape = eqn.outvars[0].aval.shape
    alike = [
        v.aval.ndim == len(shape) and v.aval.shape[dim] == shape[dim]
        for v in eqn.invars
    ]
    return [dim if a else d for a, d in zip(alike, dims, strict=True)]


def is_sum_over_ranks(eqn: Any, dims: Sequence[Dim]) -> bool:
    """Returns whether an equation is a product whose contracted dim is split.

    Args:
      eqn: Equation.
      dims: Dims along which its arguments are split.
    """
    if eqn.primitive.name != "dot_general":
        return False
    summed, _ = eqn.params["dimension_numbers"]
    return any(dim in over for dim, over in zip(dims, summed, strict=True))


Shape = tuple[int, ...]


def _elementwise(eqn: Any, dims: Sequence[Dim], made: Shape) -> Dim:
    """Propagates through elementwise operations."""
    for shape in (v.aval.shape for v in eqn.invars if v.aval.shape):
        pairs = zip(shape, made, strict=False)
        if len(shape) != len(made) or any(n not in (1, size) for n, size in pairs):
            return None
    return _in_place(eqn, dims, made)


def _in_place(eqn: Any, dims: Sequence[Dim], made: Shape) -> Dim:
    """Propagates along dims of unchanged size, whose entries stay in place."""
    for v, dim in zip(eqn.invars, dims, strict=True):
        shape = v.aval.shape
        if dim is not None and len(shape) == len(made) and shape[dim] == made[dim]:
            return dim
    return None


def _constrained(eqn: Any, dims: Sequence[Dim], _: Shape) -> Dim:
    if dims[0] in eqn.params["unconstrained_dims"]:
        return dims[0]
    return dim_of(eqn.params["sharding"].spec)


def _transpose(eqn: Any, dims: Sequence[Dim], _: Shape) -> Dim:
    return _place(eqn.params["permutation"], dims[0])


def _broadcast(eqn: Any, dims: Sequence[Dim], made: Shape) -> Dim:
    dim = dims[0] if dims else None
    if dim is None:
        return None
    new = eqn.params["broadcast_dimensions"][dim]
    return new if made[new] == eqn.invars[0].aval.shape[dim] else None


def _without(param: str) -> Callable[..., Dim]:
    """Returns a rule for operations that remove the dims named by `param`."""

    def rule(eqn: Any, dims: Sequence[Dim], _: Shape) -> Dim:
        lost = eqn.params[param]
        left = [d for d in range(eqn.invars[0].aval.ndim) if d not in lost]
        return _place(left, dims[0])

    return rule


def _reshape(eqn: Any, dims: Sequence[Dim], made: Shape) -> Dim:
    """Propagates to the dim with equally many elements before it.

    If dims are merged or factored, the outermost one is split.
    """
    dim, shape = dims[0], eqn.invars[0].aval.shape
    if dim is None:
        return None
    times = math.prod(shape[:dim])
    alike = (d for d, n in enumerate(made) if n > 1 and math.prod(made[:d]) == times)
    return next(alike, None)


def _dot_general(eqn: Any, dims: Sequence[Dim], _: Shape) -> Dim:
    """Propagates along batch and free dims; a split contraction is all-reduced."""
    summed, batched = eqn.params["dimension_numbers"]
    free = [
        [d for d in range(v.aval.ndim) if d not in (*over, *along)]
        for v, over, along in zip(eqn.invars, summed, batched, strict=True)
    ]
    left = _place([*batched[0], *free[0]], dims[0])
    if left is not None:
        return left
    return _place([*batched[1], *(None for _ in free[0]), *free[1]], dims[1])


def _gather(eqn: Any, dims: Sequence[Dim], made: Shape) -> Dim:
    """Propagates along the indices, or along unchanged dims of the slices."""
    numbers, (operand, indices, *_) = eqn.params["dimension_numbers"], dims
    window = numbers.offset_dims
    batch = [d for d in range(len(made)) if d not in window]
    if indices is not None and indices < len(batch):
        return batch[indices]
    shape = eqn.invars[0].aval.shape
    taken = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(shape)) if d not in taken]
    at = _place(kept, operand)
    return window[at] if at is not None and made[window[at]] == shape[operand] else None


def _place(dims: Sequence[Dim], dim: Dim) -> Dim:
    return dims.index(dim) if dim is not None and dim in dims else None


COPIES = ("convert_element_type", "copy", "name", "reduce_precision")
"""Primitives whose result is their operand, if in another dtype."""

IN_PLACE = {
    "slice",
    "dynamic_slice",
    "dynamic_update_slice",
    "pad",
    "concatenate",
    "split",
    "select_n",
    "scatter",
    "scatter-add",
    "all_gather",
    "reduce_scatter",
}
"""Primitives that keep entries in place along dims of unchanged size."""

REDUCTIONS = {
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "argmax",
    "argmin",
}

_RULES: dict[str, Callable[..., Dim] | None] = {
    "optimization_barrier": None,  # Result i is split like argument i.
    "sharding_constraint": _constrained,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _without("dimensions"),
    "reshape": _reshape,
    "dot_general": _dot_general,
    "gather": _gather,
    **dict.fromkeys(IN_PLACE, _in_place),
    **dict.fromkeys(REDUCTIONS, _without("axes")),
}
