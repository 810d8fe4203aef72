"""Arguments of a loss: a model, a batch, and a key if it has one of that name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

LossFn = Callable[..., Any]
"""`loss_fn(model, batch)`, and `key=key` if it takes it, to a loss or `(loss, aux)`."""


def takes_key(loss_fn: LossFn, name: str = "loss_fn") -> bool:
    """Returns whether the loss takes a key: an argument `key` that is not bound.

    Args:
      loss_fn: Loss, or another function of a model and a batch.
      name: What errors call it.

    Raises:
      ValueError: If it is no function, or takes other arguments than a model, a batch
        and a key.
    """
    if not callable(loss_fn):
        raise ValueError(
            f"{name} is a {type(loss_fn).__name__}: pass a function of a model and a "
            f"batch, {name}(model, batch)."
        )
    signature = inspect.signature(loss_fn)
    parameters = signature.parameters
    needed = [
        argument
        for argument, one in parameters.items()
        if one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if others := [argument for argument in needed[2:] if argument != "key"]:
        raise ValueError(
            f"{name} needs {', '.join(others)}: it is called with a model, a batch, "
            "and a PRNG key if it has an argument named key. Rename the argument, "
            "give it a default, or bind it by functools.partial."
        )
    try:
        signature.bind_partial(None, None)
    except TypeError as error:
        raise ValueError(
            f"{name} takes {signature}, and is called with a model and a batch "
            f"({error}). Give it both arguments."
        ) from error
    return "key" in parameters and not _binds_key(loss_fn)


def _binds_key(fn: Any) -> bool:
    """Returns whether a partial, within wrappers or not, has bound the argument."""
    if isinstance(fn, functools.partial):
        return "key" in fn.keywords or _binds_key(fn.func)
    inner = getattr(fn, "__wrapped__", None)
    return inner is not None and _binds_key(inner)
