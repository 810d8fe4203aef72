"""A model of the user's own, named on the command line by its module."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import fsdp_jax as fsdp

_PACKAGE = Path(fsdp.__file__).parent


@dataclasses.dataclass(frozen=True)
class UserModel:
    """A function that makes a model, and what a step of its training takes.

    Attributes:
      make_model: Function of a PRNG key that returns the model.
      loss: Loss function, as for `make_train_step`.
      batch: Abstract global batch.
      units: Units of the model, as for `fully_shard`.
    """

    make_model: Callable[[jax.Array], Any]
    loss: Callable[..., Any]
    batch: Any
    units: tuple[Any, ...]

    @property
    def rows(self) -> int:
        """Rows of a global batch: the first dim of its first array."""
        return jax.tree.leaves(self.batch)[0].shape[0]

    def plan(self, mesh: Mesh, config: fsdp.FSDPConfig) -> fsdp.Plan:
        """Plans the model on a mesh."""
        if not self.units:  # Nothing that could be rematerialized.
            config = dataclasses.replace(config, remat_policy=None)
        return fsdp.fully_shard(self.make_model, mesh, self.units, config)


def open_user_model(
    model: str, loss: str | None, batch: str | int | None, units: Sequence[str]
) -> UserModel:
    """Imports a model and its loss, and reads the batch.

    Args:
      model: Function that makes the model, as `package.module:name`.
      loss: Loss function, likewise.
      batch: Global batch: arrays such as `int32[8,128]` or
        `x=float32[8,64],y=int32[8]`, or `package.module:name` of a batch or of a
        function that makes one, which is traced.
      units: Path patterns, and `package.module:name` of classes and methods; with
        `stacked:` before it, a stack.

    Raises:
      ValueError: If something is missing, cannot be imported, or is not a batch.
    """
    given = {"--loss": loss, "--batch": batch}
    missing = [option for option, value in given.items() if value is None]
    if missing:
        raise ValueError(
            f"--model {model} needs {' and '.join(missing)}: --loss package.module:loss"
            " takes a model and a batch, and --batch 'x=float32[8,64],y=int32[8]' or "
            "--batch package.module:make_batch is its global batch."
        )
    return UserModel(
        make_model=_function(model, "--model"),
        loss=_with_place(
            _function(str(loss), "--loss"),
            f"--loss {loss} fails with the rows that one rank has of --batch {batch}",
        ),
        batch=_read_batch(str(batch)),
        units=tuple(_unit(one) for one in units),
    )


def check_effect(options: Any) -> None:
    """Refuses options that the kind of model at hand does not read.

    Args:
      options: Options of `fsdp-jax plan`; decoders have a config, other models are
        named by `--model`.

    Raises:
      ValueError: If there are any; all in one message.
    """
    of_decoders = (
        *("ignore_field", "seq", "fused_loss", "capacity_factor", "products"),
        *("expert_products", "dispatch_dtype", "ranks_per_node", "nodes_per_token"),
        *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    )
    is_own = options.model is not None
    unread = of_decoders if is_own else ("loss", "unit")
    default = {field.name: field.default for field in dataclasses.fields(options)}
    wrong = [name for name in unread if getattr(options, name) != default[name]]
    if is_own and options.strategy.cp_form is not None:
        wrong.append("cp_form")
    if is_own and options.strategy.attention != "auto":
        wrong.append("attention")
    if is_own and options.strategy.batch_parts != 1:
        wrong.append("batch_parts")
    if wrong:
        shown = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ValueError(
            f"{shown}: without effect {'with' if is_own else 'without'} --model."
        )
    if not is_own and isinstance(options.batch, str):
        raise ValueError(
            f"--batch {options.batch}: not a number of rows. Arrays and functions that "
            "make a batch are for --model."
        )


def _load(name: str, option: str) -> Any:
    """Imports `package.module:attribute`; from the current directory too."""
    module_name, _, path = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # As `python -m` does.
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # The module is there, and imports something that is not.
        raise ValueError(
            f"{option} {name}: there is no module '{error.name}', neither installed "
            f"nor in {Path.cwd()}."
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            near = [
                one
                for one, value in vars(found).items()
                if not (one.startswith("_") or inspect.ismodule(value))
            ]
            raise ValueError(
                f"{option} {name}: '{module_name}' has no '{path}', but "
                f"{', '.join(near[:8]) or 'nothing'}."
            )
        found = getattr(found, part)
    return found


def _function(name: str, option: str) -> Callable[..., Any]:
    found = _load(name, option) if ":" in name else None
    if not callable(found):
        raise ValueError(
            f"{option} {name}: not a function. Write it as package.module:name."
        )
    return found


def _with_place(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Returns a function whose errors say where in the user's code they arose.

    Args:
      function: Function of the user's.
      what: What failed, as the start of the message.
    """

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            said = str(error).strip().splitlines() or [""]
            raise ValueError(
                f"{what}: {type(error).__name__}: {said[0]}\n  "
                f"{_place(function, error)}"
            ) from error

    return traced


def _place(function: Callable[..., Any], error: Exception) -> str:
    """Returns the last line of the user's code that an error passed through.

    Args:
      function: Function, the place of an error that arises in calling it.
      error: Error.
    """
    own = [
        one
        for one in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in one.filename
        and not Path(one.filename).is_relative_to(_PACKAGE)
    ]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}: {own[-1].line}"
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return repr(function)
    return f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}"


def _unit(text: str) -> Any:
    """Parses a unit: a path pattern, or a class or method to import."""
    is_stacked = text.startswith("stacked:")
    text = text.removeprefix("stacked:")
    unit = _load(text, "--unit") if ":" in text else text
    return fsdp.Stacked(unit) if is_stacked else unit


_ARRAY = re.compile(r"(?:([\w.]+)=)?([a-z]\w*)\[([\d,\s]+)\]")


def _read_batch(text: str) -> Any:
    """Makes an abstract batch of its description, or of the object that it names."""
    if ":" in text:
        found = _load(text, "--batch")
        make = found if callable(found) else lambda: found
        batch = jax.eval_shape(_with_place(make, f"--batch {text}() fails"))
    else:
        batch = _read_arrays(text)
    leaves = jax.tree.leaves(batch)
    if not leaves or not all(leaf.shape for leaf in leaves):
        raise ValueError(
            f"--batch {text}: {len(leaves)} array(s). Give at least one, each with "
            "rows as its first dim, and no scalar."
        )
    return batch


def _read_arrays(text: str) -> Any:
    found = _ARRAY.findall(text)
    written = ",".join(_ARRAY.sub("", text).split(","))
    names = [name for name, _, _ in found]
    is_one = names == [""]
    if not found or written.strip(" ,") or not (is_one or all(names)):
        raise ValueError(
            f"--batch {text}: not arrays. Write one as int32[8,128], or several by "
            "name, as x=float32[8,64],y=int32[8]; or name a function that makes a "
            "batch, as package.module:make_batch."
        )
    arrays = [
        jax.ShapeDtypeStruct([int(n) for n in dims.split(",")], _dtype(dtype, text))
        for _, dtype, dims in found
    ]
    return arrays[0] if is_one else dict(zip(names, arrays, strict=True))


def _dtype(name: str, text: str) -> Any:
    try:
        return jnp.dtype(name)
    except TypeError as error:
        raise ValueError(f"--batch {text}: '{name}' is not a dtype.") from error
