"""`fsdp-jax remove`: removes parts of a checkpoint, such as optimizer state."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro

import fsdp_jax as fsdp
from fsdp_jax._report import format_bytes
from fsdp_jax.checkpoint._steps import resolve_step, state_directory
from fsdp_jax.cli._options import Unset


@dataclasses.dataclass(frozen=True)
class Remove:
    """Take a part out of a step of a checkpoint, for good.

    What stays is copied bit by bit and read again before the step is replaced, so that
    a process that is killed leaves it whole. Not while a run saves there.

    Attributes:
      checkpoint: A directory of `fsdp-jax train --save`, or of `fsdp_jax.save`.
      parts: Leaves to remove, as `fsdp-jax inspect` names leaves: opt_state,
        params.layers.*, extras.data, files.tokenizer.
      step: Step to change; default the newest.
    """

    checkpoint: tyro.conf.Positional[Path]
    parts: tyro.conf.Positional[tuple[str, ...]]
    step: Unset[int] = None

    def run(self) -> None:
        """Prints what is gone, and how much room that gave back."""
        step = resolve_step(self.checkpoint, self.step)
        before = _size_of(state_directory(self.checkpoint, step))
        gone = fsdp.checkpoint.remove(self.checkpoint, step, *self.parts)
        freed = before - _size_of(state_directory(self.checkpoint, step))
        for name in gone:
            print(name)
        print(f"gone from step {step} of {self.checkpoint}: {format_bytes(freed)}")


def _size_of(directory: Path) -> int:
    files = (path for path in directory.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)
