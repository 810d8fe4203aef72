"""`fsdp-jax export`: from a checkpoint to a directory that transformers loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

import bridge
import fsdp_jax as fsdp
from fsdp_jax.cli._errors import check_empty
from fsdp_jax.cli._model import plan_decoder
from fsdp_jax.cli._options import Devices, Unset
from fsdp_jax.cli._origin import open_checkpoint
from fsdp_jax.cli._progress import bytes_bar


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a checkpoint as a directory that transformers loads.

    Attributes:
      checkpoint: A directory given to `fsdp-jax train --save`.
      out: The directory to write; new, or empty.
      step: Which step; default the newest.
      dtype: Dtype of the files; default that of the checkpoint.
      where: On which devices.
    """

    checkpoint: tyro.conf.Positional[Path]
    out: tyro.conf.Positional[Path]
    step: Unset[int] = None
    dtype: Unset[Literal["float32", "bfloat16", "float16"]] = None
    where: Annotated[Devices, tyro.conf.arg(name="")] = Devices()

    def run(self) -> None:
        """Loads the parameters sharded over all devices, and writes them."""
        check_empty(self.out, "OUT")
        mesh = fsdp.make_mesh(devices=self.where.pick())
        origin = open_checkpoint(self.checkpoint, self.step)
        plan = plan_decoder(origin.config, mesh)
        params = origin.load_params(plan.params, as_stored=True)
        with bytes_bar(f"writing {self.out}") as progress:
            bridge.save_hf(
                self.out, params, origin.config, dtype=self.dtype, progress=progress
            )
        print(f"step {origin.step} of {self.checkpoint} is now in {self.out}")
