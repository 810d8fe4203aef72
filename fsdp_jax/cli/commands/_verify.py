"""`fsdp-jax verify`: checks that a checkpoint is as it was written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._steps import committed_steps, resolve_step
from fsdp_jax.cli._errors import CheckFailed


@dataclasses.dataclass(frozen=True)
class Verify:
    """Read every byte of a checkpoint and compare it with its manifest.

    Attributes:
      checkpoint: Directory of `fsdp-jax train --save`, or of `fsdp_jax.save`.
      step: Step to verify; default all.
    """

    checkpoint: tyro.conf.Positional[Path]
    step: int | None = None

    def run(self) -> None:
        """Prints a line for each step that is intact, then what is damaged."""
        newest = resolve_step(self.checkpoint, self.step)
        all_steps = committed_steps(self.checkpoint)
        damaged = []
        for step in all_steps if self.step is None else [newest]:
            try:
                found = fsdp.checkpoint.verify(self.checkpoint, step=step)
            except fsdp.checkpoint.DamagedCheckpointError as error:
                damaged.append(str(error))
            else:
                print(
                    f"step {step}: {found.num_leaves} leaves, {found.num_files} files, "
                    f"{found.num_bytes:,} bytes: as they were written"
                )
        if damaged:
            raise CheckFailed("\n".join(damaged))
