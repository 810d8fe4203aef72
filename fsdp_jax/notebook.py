"""IPython extension that shortens tracebacks of errors raised by our packages.

Load it by `%load_ext fsdp_jax.notebook`.
"""

from __future__ import annotations

import linecache
import traceback
from types import TracebackType
from typing import Any

from fsdp_jax.audit._audit_step import AuditError
from fsdp_jax.checkpoint import NotSavedError

PACKAGES = ("fsdp_jax", "bridge")
MENDABLE = (ValueError, TypeError, FileNotFoundError, AuditError, NotSavedError)
"""Error types that a user can fix."""
_HOOK = "_render_traceback_"


def load_ipython_extension(shell: Any) -> None:
    """Shows errors of `fsdp_jax` or `bridge` as their message and the cell's line.

    Run by `%load_ext fsdp_jax.notebook` in Jupyter or IPython. A traceback through a compiler is
    long, and its last line is the one that says what to fix. Errors raised by other
    code are shown as usual, and `%tb` shows the whole traceback of the last error.

    Args:
      shell: IPython's interactive shell.
    """
    shell.set_custom_exc(MENDABLE, _show)


def unload_ipython_extension(shell: Any) -> None:
    """Restores IPython's display of errors, for `%unload_ext fsdp_jax`.

    Args:
      shell: IPython's interactive shell.
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
        # IPython calls this hook to render an error. It is removed afterwards, so that
        # `%tb` shows the whole traceback.
        vars(error)[_HOOK] = lambda: _paragraph(kind, error, trace)
    try:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
    finally:
        vars(error).pop(_HOOK, None)


def _is_ours(trace: TracebackType) -> bool:
    """Returns whether code of `PACKAGES` raised the error."""
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
        # The first frame is the cell's line; later ones are callbacks defined in it.
        file, number = called[0]
        source = linecache.getline(file, number).strip()
        lines += ["", f"in line {number}: {source}", "(%tb shows the whole traceback)"]
    return lines
