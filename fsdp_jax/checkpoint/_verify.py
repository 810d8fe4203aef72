"""Whether a step is still what was written."""

from __future__ import annotations

import dataclasses
import os

from fsdp_jax.checkpoint._steps import check_whole, resolve_step, state_directory


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
    """Reads all of a step and compares it with its manifest and its checksums.

    Before a checkpoint is archived or handed on, and after it was copied. `load` needs
    no such pass: it verifies the checksum of every chunk that it reads.

    Args:
      path: The directory that `save` wrote to.
      step: Which step; None for the newest.

    Raises:
      ValueError: If there is no such step.
      DamagedCheckpointError: If it is not as it was written.
    """
    step = resolve_step(path, step)
    manifest = check_whole(state_directory(path, step))
    return Verified(
        step,
        num_leaves=len(manifest.leaves),
        num_files=len(manifest.files),
        num_bytes=sum(file.size for file in manifest.files.values()),
    )
