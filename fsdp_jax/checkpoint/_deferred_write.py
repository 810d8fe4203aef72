"""Writes files beside the arrays of a step."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from fsdp_jax.checkpoint._paths import as_path, copy_in


@dataclasses.dataclass(frozen=True)
class Writing:
    """Pending writes of files to a step, as a future that Orbax waits for.

    Attributes:
      directory: State directory of the step; it exists once the arrays are written.
      contents: Content, or source file to copy, by path in the directory.
    """

    directory: str | os.PathLike[str]
    contents: Mapping[str, bytes | Path]

    def result(self, timeout: float | None = None) -> None:
        """Writes the files."""
        for name, content in self.contents.items():
            path = as_path(self.directory) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                copy_in(content, path)
            else:
                path.write_bytes(content)

    def cancel(self) -> None:
        """Does nothing, since no write is in flight before `result`."""
