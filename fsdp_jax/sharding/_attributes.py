"""Runs a model's constructor under a trace, and finds what cannot be traced in it."""

from __future__ import annotations

import functools
import inspect
import linecache
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from flax import linen, nnx
from jax.core import Tracer

from fsdp_jax.sharding._ambient_mesh import no_mesh

_NO_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""Errors of jax where a Python number or a numpy array is made of a traced array."""

_TRACED = (
    "make_model is traced, so that a plan takes no memory: in it arrays of jax have a "
    "shape and no values"
)


def check_make_model(make_model: Any) -> None:
    """Raises a `ValueError` unless it is a function that takes one argument, a key."""
    if isinstance(make_model, nnx.Module | linen.Module):
        name = type(make_model).__name__
        raise ValueError(
            f"make_model is a {name}. Pass a function that makes it from a PRNG key, "
            "as in `lambda key: Model(rngs=nnx.Rngs(key))` or, for linen, `lambda key: "
            "model.init(key, x)`."
        )
    if not callable(make_model):
        raise ValueError(
            f"make_model is a {type(make_model).__name__}. Pass a function of a PRNG "
            "key that returns the model or its weights."
        )
    if inspect.isclass(make_model) and issubclass(make_model, nnx.Module):
        needed = list(inspect.signature(make_model.__init__).parameters)[1:2]
        if needed == ["rngs"]:  # Of a key it would ask for streams.
            raise ValueError(
                f"make_model is the class {make_model.__name__}, which takes nnx.Rngs, "
                "and is called with one PRNG key. Write `lambda key: "
                f"{make_model.__name__}(rngs=nnx.Rngs(key))`."
            )
    # flax's classes are called with any arguments, which they pass to `__init__`.
    is_class = inspect.isclass(make_model)
    try:
        signature = inspect.signature(make_model.__init__ if is_class else make_model)
    except (TypeError, ValueError):  # Some functions written in C have none.
        return
    try:
        signature.bind(*((None, None) if is_class else (None,)))
    except TypeError as error:
        raise ValueError(
            f"make_model takes {signature}, and is called with one PRNG key ({error}). "
            "Write e.g. `lambda key: Model(config, rngs=nnx.Rngs(key))`."
        ) from error


def trace_model(make_model: Callable[[jax.Array], Any], key: jax.Array) -> Any:
    """Runs `make_model(key)` under a trace, with its arrays found as in an eager call.

    nnx decides when an attribute is set whether it is data. It takes an array for data
    but a tracer for static, so that the tracer would be missing from the model's state.
    The model's own sharding annotations have no effect: the plan decides.

    Raises:
      ValueError: If `make_model` reads the value of an array, or a function in the
        model closes over an array computed by `make_model`.
    """
    try:
        model = _made_without_shardings(make_model, key)
    except _NO_VALUE as error:
        raise ValueError(
            f"{_TRACED}. One is read as a number{_place_of(error.__traceback__)}. "
            "Compute such numbers with numpy (np.linspace for jnp.linspace) or math, "
            "or compute and read them under jax.ensure_compile_time_eval()."
        ) from error
    except Exception as error:
        error.add_note(
            "Raised by make_model(key), which is called with a PRNG key of jax and "
            "under a trace; flax.nnx takes nnx.Rngs(key)."
        )
        raise
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
            f"{_TRACED}, and function(s) in the model close over such arrays: "
            f"{', '.join(problems)}. Make the array an attribute of the model, which "
            "the function reads when it is called, or a numpy array."
        )
    return model


def _made_without_shardings(make_model: Callable[[jax.Array], Any], key: Any) -> Any:
    """Runs `make_model(key)` with the annotations of flax's models left unapplied."""
    default = nnx.using_eager_sharding()
    with no_mesh(), linen.logical_axis_rules(()), nnx.use_eager_sharding(False):
        model = make_model(key)
    for variable in _variables(model):
        # Part of the tree's structure, which is to be that of a model made eagerly.
        if variable.get_metadata("eager_sharding", default) != default:
            variable.set_metadata(eager_sharding=default)
    return model


def _variables(model: Any) -> list[nnx.Variable]:
    def is_variable(node):
        return isinstance(node, nnx.Variable)

    if isinstance(model, nnx.Module):
        return [node for _, node in nnx.iter_graph(model) if is_variable(node)]
    return [n for n in jax.tree.leaves(model, is_leaf=is_variable) if is_variable(n)]


def _place_of(traceback: TracebackType | None) -> str:
    """Returns the innermost line of the user's own code, as ` at FILE:LINE: CODE`."""
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib")]
    place = ""
    while traceback is not None:
        code, line = traceback.tb_frame.f_code, traceback.tb_lineno
        own = not code.co_filename.startswith((*installed, "<", __file__))
        if own:
            text = linecache.getline(code.co_filename, line).strip()
            place = f" at {Path(code.co_filename).name}:{line}: `{text}`"
        traceback = traceback.tb_next
    return place


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
