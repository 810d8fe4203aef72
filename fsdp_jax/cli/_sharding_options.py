"""What a step shards, keeps and runs when: options that change no number."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
from jax.sharding import Mesh

import fsdp_jax as fsdp
from fsdp_jax.cli._context_parallel import CPForm
from fsdp_jax.sharding._pipeline_config import ScheduleName

Remat = Literal["all", "dots", "attention", "nothing"]

_KEPT = {
    "all": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names("context_attention"),
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Options of `FSDPConfig` and of the scan over layers.

    Attributes:
      zero: ZeRO strategy, 0 to 3.
      outer: Arrays that dp_outer splits: 0 none (HSDP), 1 the optimizer's (HFSDP).
      remat: Activations of a layer that are saved for backward: all, dots, with cp the
        results of attention (attention), or nothing.
      prefetch: Number of layers gathered ahead of the one that computes.
      unroll: Number of layers in one iteration of the compiled loop.
      cp_form: Context-parallel attention algorithm: ring, all_gather or ulysses.
      schedule: Pipeline schedule: 1f1b, or gpipe, which stores more inputs.
      virtual_stages: Number of parts of the stack that each stage runs.
    """

    zero: int = 3
    outer: int = 0
    remat: Remat = "all"
    prefetch: int = 1
    unroll: int = 1
    cp_form: CPForm = "ring"
    schedule: ScheduleName = "1f1b"
    virtual_stages: int = 1

    def applied(self, config: fsdp.FSDPConfig, mesh: Mesh) -> fsdp.FSDPConfig:
        """Returns `config` with these options.

        Args:
          config: Config with all other options.
          mesh: Device mesh.

        Raises:
          ValueError: If `remat` is attention, and no attention over cp saves results.
        """
        if self.remat == "attention" and (
            mesh.shape["cp"] == 1 or self.cp_form == "ulysses"
        ):
            raise ValueError(
                "--remat attention keeps what attention makes of a row that is split "
                "over cp in the form ring or all_gather: split rows over cp, or use "
                "--remat nothing."
            )
        return dataclasses.replace(
            config,
            zero_dp_strategy=self.zero,
            outer_dp_sharding_strategy=self.outer,
            remat_policy=_KEPT[self.remat],
            pipeline=fsdp.PipelineConfig(self.schedule, self.virtual_stages),
        )
