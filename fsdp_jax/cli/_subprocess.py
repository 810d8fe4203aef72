"""Runs code in a child process, because it may abort its process."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_MARK = "fsdp-jax child: "


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a child process.

    Attributes:
      result: Reported result; None if the child died.
      error: Text written to stderr.
      timed_out: Whether it was killed at the time limit.
    """

    result: Any = None
    error: str = ""
    timed_out: bool = False

    @property
    def alive(self) -> bool:
        """Whether the child reported a result."""
        return self.result is not None

    @property
    def reason(self) -> str:
        """Last error in the output, or else its last line."""
        lines = [line.strip() for line in self.error.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]+Error: ", line)]
        return next(reversed(errors or lines), "it said nothing")


def run_child(code: str, environ: Mapping[str, str], time_limit: float) -> Outcome:
    """Runs Python code, which sets `result` to something that JSON can hold.

    Args:
      code: Whatever it prints besides is ignored.
      environ: Replaces variables of this process's environment.
      time_limit: Seconds.
    """
    source = f"import json\n{code}\nprint({_MARK!r} + json.dumps(result), flush=True)"
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", source],
            env={**os.environ, **_like_here(), **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=time_limit,
        )
    except subprocess.TimeoutExpired as stopped:
        return Outcome(error=_text(stopped.stderr), timed_out=True)
    # A variable too long or with a NUL, no memory for another process.
    except (OSError, ValueError) as error:
        return Outcome(error=str(error))
    for line in reversed(child.stdout.splitlines()):
        if line.startswith(_MARK):
            return Outcome(json.loads(line.removeprefix(_MARK)), child.stderr)
    return Outcome(error=child.stderr or f"it ended with status {child.returncode}")


def _like_here() -> dict[str, str]:
    """Returns variables with which a child imports as this process does."""
    return {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


def _text(output: str | bytes | None) -> str:
    # subprocess gives bytes of a child that it ended, whatever was asked for.
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    return text or ""
