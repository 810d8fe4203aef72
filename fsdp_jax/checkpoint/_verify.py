"""Whether a step is still what was written."""

from __future__ import annotations

import dataclasses
import os

from fsdp_jax.checkpoint._manifest import check_files
from fsdp_jax.checkpoint._steps import open_step, resolve_step


@dataclasses.dataclass(frozen=True)
class Verified:
    """What `verify` read.

    Attributes:
      step: Which step.
      num_leaves: Arrays in it.
      num_files: Files in it.
      num_bytes: Their sizes together.
    """

    step: int
    num_leaves: int
    num_files: int
    num_bytes: int


def verify(path: str | os.PathLike[str], *, step: int | None = None) -> Verified:
    """Reads every byte of a step and compares it with the manifest.

    Before a checkpoint is archived or handed on, and after it was copied. `load` needs
    no such pass: it verifies the checksum of every chunk that it reads.

    Args:
      path: The directory that `save` wrote to.
      step: Which step; None for the newest.

    Raises:
      ValueError: If there is no such step.
      DamagedCheckpointError: If a file is gone or differs; all in one message.
    """
    step = resolve_step(path, step)
    directory, manifest = open_step(path, step)
    check_files(directory, manifest, values=True)
    return Verified(
        step,
        num_leaves=len(manifest.leaves),
        num_files=len(manifest.files),
        num_bytes=sum(file.size for file in manifest.files.values()),
    )
