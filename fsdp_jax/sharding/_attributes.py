"""Arrays that a model built under a trace holds in plain attributes and closures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer


def trace_model(make_model: Callable[[jax.Array], Any], key: jax.Array) -> Any:
    """Runs `make_model(key)` under a trace, with its arrays found as in an eager call.

    nnx decides when an attribute is set whether it is data. It takes an array for data
    but a tracer for static, so that the tracer would be missing from the model's state.

    Raises:
      ValueError: If a function in the model closes over an array computed by
        `make_model`.
    """
    model = make_model(key)
    problems = []
    if isinstance(model, nnx.Module):
        for path, module in nnx.iter_modules(model):
            for name, value in list(vars(module).items()):
                if isinstance(value, Tracer):
                    setattr(module, name, nnx.data(value))
                place = ".".join(map(str, (*path, name)))
                problems += [f"{place} ({var})" for var in closed_over_tracers(value)]
    else:
        for path, leaf in jax.tree_util.tree_leaves_with_path(model):
            place = jax.tree_util.keystr(path)
            problems += [f"{place} ({var})" for var in closed_over_tracers(leaf)]
    if problems:
        raise ValueError(
            "Function(s) in the model close over arrays that make_model computes: "
            f"{', '.join(problems)}. Make the array an attribute of the model, which "
            "the function reads when it is called, or a numpy array."
        )
    return model


def closed_over_tracers(fn: Any) -> Iterator[str]:
    """Yields the names of traced values that a function reads and is not passed.

    These are variables of a closure, defaults of arguments, and arguments bound by a
    partial. The object of a bound method is left out: a model's method need not read
    its weights.
    """
    if isinstance(fn, functools.partial):
        bound = {f"argument {i} of partial": a for i, a in enumerate(fn.args)}
        yield from _traced({**bound, **fn.keywords})
        yield from closed_over_tracers(fn.func)
        return
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    defaults = getattr(fn, "__defaults__", None) or ()
    names = code.co_varnames[: code.co_argcount]
    yield from _traced(dict(zip(reversed(names), reversed(defaults), strict=False)))
    yield from _traced(getattr(fn, "__kwdefaults__", None) or {})
    cells = getattr(fn, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            yield from _traced({name: cell.cell_contents})
        except ValueError:  # An empty cell: the name is assigned later.
            continue


def _traced(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            yield name
