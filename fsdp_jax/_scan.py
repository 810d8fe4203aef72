"""A stack of identical units, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.core import Tracer

from fsdp_jax._tree import PyTree
from fsdp_jax._unit import unit as mark


def scan(
    unit: Callable[..., tuple[PyTree, PyTree]],
    stacked: PyTree,
    carry: PyTree,
    xs: tuple[PyTree, ...] = (),
    consts: tuple[PyTree, ...] = (),
) -> tuple[PyTree, PyTree]:
    """Runs `unit` over a stack of weights, gathering one slice of it at a time.

    Args:
      unit: `unit(weights, carry, *x_slices, *consts) -> (carry, y)`, where `weights` is
        one slice of `stacked`, whole.
      stacked: The weights of all units, a leading dim `layers` on every leaf.
      carry: What goes from unit to unit.
      xs: Trees with the same leading dim, a slice of each for every unit, e.g. keys.
      consts: Trees that every unit sees whole, e.g. rope tables. What the result is to
        be differentiated by enters here, not through a closure.

    Returns:
      The last carry, and the `y`s stacked on a new leading dim.

    Raises:
      ValueError: If `unit` closes over a traced value, or `xs` or `consts` is no tuple.
    """
    for name, value in (("xs", xs), ("consts", consts)):
        if not isinstance(value, tuple):
            raise ValueError(
                f"fsdp.scan({name}=...) takes a tuple of trees, got a "
                f"{type(value).__name__}: write {name}=({name},)."
            )
    if caught := sorted(_closed_over_tracers(unit)):
        raise ValueError(
            f"The unit given to fsdp.scan closes over traced value(s): "
            f"{', '.join(caught)}. A unit takes what it computes with by its "
            "arguments: pass it in `consts` (same for every unit) or `xs` (one slice "
            "each)."
        )
    gathering = mark(unit)

    def body(carry, slices):
        weights, x = slices
        return gathering(weights, carry, *x, *consts)

    return jax.lax.scan(body, carry, (stacked, xs))


def _closed_over_tracers(fn: Callable[..., Any]) -> Iterator[str]:
    if isinstance(fn, functools.partial):
        bound = {f"argument {i} of partial": a for i, a in enumerate(fn.args)}
        yield from _traced({**bound, **fn.keywords})
        yield from _closed_over_tracers(fn.func)
        return
    code = getattr(fn, "__code__", None)
    cells = getattr(fn, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars if code else (), cells, strict=True):
        try:
            yield from _traced({name: cell.cell_contents})
        except ValueError:  # An empty cell: the name is assigned later.
            continue


def _traced(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            yield name
