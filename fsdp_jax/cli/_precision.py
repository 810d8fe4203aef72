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
    """Options of low precision, besides the dtype of weights.

    Attributes:
      param_gather: Format in which the matrices of layers are gathered.
      loss_scale: Initial loss scale; None for none.
      optimizer_bits: Bits of an element of AdamW's moments.
    """

    param_gather: ParamGather
    loss_scale: float | None
    optimizer_bits: OptimizerBits

    def sharding(
        self, config: fsdp.FSDPConfig, offload: OffloadTo | None
    ) -> fsdp.FSDPConfig:
        """Returns `config` with these options.

        Args:
          config: How the model is sharded.
          offload: State stored in the host's memory; None for none.
        """
        gather = _GATHERS[self.param_gather]
        policy = dataclasses.replace(config.mp_policy, param_gather=gather)
        return dataclasses.replace(config, mp_policy=policy, offload=_OFFLOADS[offload])

    def scale(self) -> fsdp.training.LossScale | None:
        """Returns the initial loss scale, or None."""
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
