"""How `fsdp-jax train` keeps, moves and computes numbers, as its options say it."""

from __future__ import annotations

import dataclasses
from typing import Literal

import optax

import fsdp_jax as fsdp
from fsdp_jax.cli._adam import AdamOptions

ParamGather = Literal["param_dtype", "float8", "mxfp8"]
OptimizerBits = Literal[32, 8]
OffloadTo = Literal["optimizer", "all"]

_GATHERS = {
    "param_dtype": None,
    "float8": fsdp.sharding.Float8Gather(),
    "mxfp8": fsdp.sharding.MXFP8Gather(),
}
_OFFLOADS = {
    None: None,
    "optimizer": fsdp.OffloadPolicy(),
    "all": fsdp.OffloadPolicy(params=True),
}


@dataclasses.dataclass(frozen=True)
class Precision:
    """What a run computes with beside the dtype of its weights.

    Attributes:
      param_gather: What a layer's matrices travel in.
      loss_scale: The first factor of the loss; None for none.
      optimizer_bits: Of an element of AdamW's moments.
    """

    param_gather: ParamGather
    loss_scale: float | None
    optimizer_bits: OptimizerBits

    def sharding(
        self, config: fsdp.FSDPConfig, offload: OffloadTo | None
    ) -> fsdp.FSDPConfig:
        """The same config, with weights that travel and rest so.

        Args:
          config: How the model is sharded.
          offload: What rests in the host's memory; None for nothing.
        """
        gather = _GATHERS[self.param_gather]
        policy = dataclasses.replace(config.mp_policy, param_gather=gather)
        return dataclasses.replace(config, mp_policy=policy, offload=_OFFLOADS[offload])

    def scale(self) -> fsdp.training.LossScale | None:
        """The factor of the loss, as it begins."""
        return (
            None
            if self.loss_scale is None
            else fsdp.training.LossScale(self.loss_scale)
        )

    def adamw(
        self, lr: float, weight_decay: float, adam: AdamOptions | None = None
    ) -> optax.GradientTransformation:
        """AdamW, its moments held in these bits."""
        tx = (adam or AdamOptions()).adamw(lr, weight_decay)
        return fsdp.optim.eight_bit(tx) if self.optimizer_bits == 8 else tx
