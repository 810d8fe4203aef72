"""Verifies that a step is as it was written."""

from __future__ import annotations

import dataclasses
import os

from fsdp_jax.checkpoint._steps import check_step, resolve_step


@dataclasses.dataclass(frozen=True)
class Verified:
    """Result of `verify`.

    Attributes:
      step: Step number.
      num_leaves: Number of arrays.
      num_files: Number of files.
      num_bytes: Total size of the files in bytes.
    """

    step: int
    num_leaves: int
    num_files: int
    num_bytes: int


def verify(path: str | os.PathLike[str], *, step: int | None = None) -> Verified:
    """Reads a whole step and checks it against its manifest and checksums.

    Use it before archiving or sharing a checkpoint, and after copying one. `load` does
    not need it, since it verifies the checksum of every chunk that it reads.

    Args:
      path: Directory that `save` wrote to.
      step: Step to verify; None for the newest.

    Raises:
      ValueError: If there is no such step.
      DamagedCheckpointError: If the step is not as it was written.
    """
    step = resolve_step(path, step)
    manifest = check_step(path, step)
    return Verified(
        step,
        num_leaves=len(manifest.leaves),
        num_files=len(manifest.files),
        num_bytes=sum(file.size for file in manifest.files.values()),
    )
