"""Communication, offload and loss scale of a run, from options."""

from __future__ import annotations

import dataclasses
from typing import Literal

import fsdp_jax as fsdp

ParamGather = Literal["param_dtype", "float8", "mxfp8"]
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
    """Numerics of a run beside the dtype of its weights.

    Attributes:
      param_gather: Format in which the matrices of layers are communicated.
      loss_scale: Initial factor of the loss; None for none.
    """

    param_gather: ParamGather
    loss_scale: float | None

    def sharding(
        self, config: fsdp.FSDPConfig, offload: OffloadTo | None
    ) -> fsdp.FSDPConfig:
        """Returns a config with this communication and offload.

        Args:
          config: Config with all other fields.
          offload: State kept in host memory; None for none.
        """
        gather = _GATHERS[self.param_gather]
        policy = dataclasses.replace(config.mp_policy, param_gather=gather)
        return dataclasses.replace(config, mp_policy=policy, offload=_OFFLOADS[offload])

    def scale(self) -> fsdp.training.LossScale | None:
        """Returns the initial loss scale; None for none."""
        return (
            None
            if self.loss_scale is None
            else fsdp.training.LossScale(self.loss_scale)
        )
