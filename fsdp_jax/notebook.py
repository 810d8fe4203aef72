"""`%load_ext fsdp_jax`: in a notebook, an error of ours is a paragraph."""

from __future__ import annotations

import linecache
import traceback
from types import TracebackType
from typing import Any

from fsdp_jax.audit._audit_step import AuditError
from fsdp_jax.checkpoint import NotSavedError

PACKAGES = ("fsdp_jax", "bridge")
MENDABLE = (ValueError, TypeError, FileNotFoundError, AuditError, NotSavedError)
"""Kinds that say what a user can mend."""
_HOOK = "_render_traceback_"


def load_ipython_extension(shell: Any) -> None:
    """Shows errors that `fsdp_jax` or `bridge` raise as their message and your line.

    For `%load_ext fsdp_jax` in Jupyter or IPython. A traceback through a compiler is
    long, and what can be mended stands in its last line. Errors that any other code
    raises are shown as always, and `%tb` shows the whole traceback of the last one.

    Args:
      shell: IPython's.
    """
    shell.set_custom_exc(MENDABLE, _show)


def unload_ipython_extension(shell: Any) -> None:
    """Shows all errors as IPython does, for `%unload_ext fsdp_jax`.

    Args:
      shell: IPython's.
    """
    shell.set_custom_exc((), None)


def _show(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType,
    tb_offset: int | None = None,
) -> None:
    if _is_ours(trace):
        # What IPython asks an error for, if it has it; `%tb` is to find it without.
        vars(error)[_HOOK] = lambda: _paragraph(kind, error, trace)
    try:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
    finally:
        vars(error).pop(_HOOK, None)


def _is_ours(trace: TracebackType) -> bool:
    """Whether a line of ours raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    raised_in = frames[-1].f_globals.get("__name__", "")
    return raised_in.partition(".")[0] in PACKAGES


def _paragraph(
    kind: type[BaseException], error: BaseException, trace: TracebackType
) -> list[str]:
    lines = [f"{kind.__name__}: {error}"]
    called = [
        (frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(trace)
        if frame.f_globals.get("__name__") == "__main__"
    ]
    if called:
        # The cell's own line, not that of a function of yours which was called back.
        file, number = called[0]
        source = linecache.getline(file, number).strip()
        lines += ["", f"in line {number}: {source}", "(%tb shows the whole traceback)"]
    return lines
