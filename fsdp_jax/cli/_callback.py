"""Function of the user that is called with the metrics of each step."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import jax

from fsdp_jax.cli._metrics import StepMetrics

Callback = Callable[[dict[str, Any]], object]
"""Function of the fields of `StepMetrics`, as Python numbers."""


def load_callback(name: str) -> Callback:
    """Imports a function, also from the current directory, as `python -m` does.

    Args:
      name: `module:function`.

    Raises:
      ValueError: If there is no such module or function, or it cannot be called.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(
            f"--callback {name}: not of the form module:function, e.g. my_logs:send."
        )
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module is the user's: it may raise anything
        raise ValueError(
            f"--callback {name}: '{module_name}' cannot be imported ({error!r}). It is "
            "looked for in the current directory and among the installed packages."
        ) from error
    callback = getattr(module, function_name, None)
    if not callable(callback):
        raise ValueError(
            f"--callback {name}: '{module.__file__}' has no '{function_name}' that "
            "can be called. Name a function that takes a dict."
        )
    return callback


def call(callback: Callback | None, metrics: StepMetrics) -> None:
    """Calls the callback with the metrics of a step, in process 0 alone.

    Raises:
      RuntimeError: If the callback raises. Its own error would be taken for bad input
        if it were a `ValueError`, and lose its traceback.
    """
    if callback is None or jax.process_index() != 0:
        return
    try:
        callback(metrics.as_dict())
    except Exception as error:
        raise RuntimeError(f"--callback failed at step {metrics.step}.") from error
