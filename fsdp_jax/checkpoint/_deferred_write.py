"""Files that are written to a step beside its arrays."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Writing:
    """Files still to be written to a step, as a future that Orbax waits for.

    Attributes:
      directory: Of the step; it exists once the arrays are written.
      contents: By place in there: the content, or a file to copy.
    """

    directory: str | os.PathLike[str]
    contents: Mapping[str, bytes | Path]

    def result(self, timeout: float | None = None) -> None:
        """Writes them."""
        for name, content in self.contents.items():
            path = Path(self.directory) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, path)
            else:
                path.write_bytes(content)

    def cancel(self) -> None:
        """Does nothing: there is nothing under way before `result`."""
