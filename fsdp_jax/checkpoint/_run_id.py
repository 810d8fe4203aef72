"""Id of the run that saves to a directory, which its steps carry too."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from typing import Any

from fsdp_jax.checkpoint._manifest import DamagedCheckpointError
from fsdp_jax.checkpoint._paths import as_path, is_local
from fsdp_jax.checkpoint._replace import write_through

RUN_ID = "run_id"
_ID = re.compile("[0-9a-f]{16}")


def find_run_id(path: str | os.PathLike[str]) -> str | None:
    """Returns the id of the run that saves to a directory; None if it has none.

    Raises:
      DamagedCheckpointError: If the file with the id holds anything else, such as a
        path, or is not a file.
    """
    file = as_path(path) / RUN_ID
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise _damaged(file, "is a link, or no regular file")
    if not file.exists():
        return None
    with file.open("rb") as opened:
        text = opened.read(100).decode(errors="replace")
    if not _ID.fullmatch(text):
        raise _damaged(file, f"holds {text[:40]!r}")
    return text


def _damaged(file: Any, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"'{file}' {what}, but the id of a run has 16 hex digits. Remove it: the next "
        "save takes the id of the newest step."
    )


def make_run_id(
    path: str | os.PathLike[str], newest: Callable[[], str | None] = lambda: None
) -> str:
    """Returns the id of the run that saves to a directory; creates it on first use.

    Args:
      path: Directory of the run; created if missing.
      newest: Function that returns the id in the newest step; None if there is none.
        A directory without an id belongs to the run of its newest step.

    Raises:
      DamagedCheckpointError: If the file with the id holds anything else.
    """
    found = find_run_id(path)
    if found is not None:
        return found
    made = newest() or secrets.token_hex(8)
    directory = as_path(path)
    if not is_local(directory):
        (directory / RUN_ID).write_text(made)
        return made
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f"{RUN_ID}.{secrets.token_hex(4)}.part"
    try:
        with part.open("x") as file:
            file.write(made)
        write_through(part)
        part.rename(directory / RUN_ID)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    write_through(directory)
    return made
