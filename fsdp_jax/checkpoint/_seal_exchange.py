"""Brings the seals of each process's data files to process 0, by files of the step."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import jax

from fsdp_jax.checkpoint._manifest import seal_from_json
from fsdp_jax.checkpoint._paths import as_path
from fsdp_jax.checkpoint._seal import Seal, seal_files

_PREFIX = "seals."


@dataclasses.dataclass(frozen=True)
class Sealing:
    """Pending seals of this process's data files, as a future that Orbax waits for.

    Attributes:
      directory: State directory of the step.
      attempt: Id of the save.
    """

    directory: str | os.PathLike[str]
    attempt: str

    def result(self, timeout: float | None = None) -> None:
        """Seals the files, all of which are written."""
        path, rank = as_path(self.directory), jax.process_index()
        folder = f"ocdbt.process_{rank}"
        written = (path / folder / "manifest.ocdbt").exists()
        sealed = seal_files(path / folder) if written else {}
        body = {f"{folder}/{n}": dataclasses.asdict(s) for n, s in sealed.items()}
        text = json.dumps({"attempt": self.attempt, "files": body})
        (path / f"{_PREFIX}{rank}.json").write_text(text)

    def cancel(self) -> None:
        """Does nothing, since nothing is in flight before `result`."""


def take_seals(directory: Path, attempt: str) -> dict[str, Seal]:
    """Returns the seals of all processes' data files, and removes their files.

    Raises:
      RuntimeError: If a process left none, or that of another attempt.
    """
    sealed: dict[str, Seal] = {}
    for rank in range(jax.process_count()):
        path = directory / f"{_PREFIX}{rank}.json"
        content = json.loads(path.read_bytes()) if path.exists() else {}
        if content.get("attempt") != attempt:
            raise RuntimeError(
                f"'{path}' is of attempt {content.get('attempt')}, and this save is "
                f"attempt {attempt}: process {rank} wrote to another folder. Do all "
                "processes see one file system?"
            )
        for name, value in content["files"].items():
            sealed[name] = seal_from_json(value)
        path.unlink()
    return sealed
