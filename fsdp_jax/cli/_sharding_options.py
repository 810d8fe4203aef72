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
    """How a plan is carried out.

    Attributes:
      zero: What is sharded: ZeRO 0 to 3.
      outer: What dp_outer splits: 0 nothing (HSDP), 1 the optimizer (HFSDP).
      remat: What of a layer's activations is kept for backward: all, dots, over cp what
        attention made (attention), or nothing.
      prefetch: Layers gathered ahead of the one that computes.
      unroll: Layers in one iteration of the compiled loop.
      cp_form: How tokens see those of others on cp: keys and values go round (ring),
        are gathered, or tokens are traded for heads (ulysses).
      schedule: Of the stages over pp: 1f1b, which keeps what the stages need, or gpipe.
      virtual_stages: Parts of the layers that each stage has.
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
        """A config that is carried out so.

        Args:
          config: Says everything else.
          mesh: On which.

        Raises:
          ValueError: If there is no attention over cp whose results could be kept.
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
