"""Dtypes, communication, offload and loss scale of a run, from options."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import fsdp_jax as fsdp

ParamGather = Literal["param_dtype", "float8", "mxfp8", "block_float8", "nvfp4"]
ParamDtype = Literal["float32", "bfloat16", "float16"]
Products = Literal["param_dtype", "float8", "mxfp8"]
ExpertProducts = Literal["param_dtype", "float8"]
OffloadTo = Literal["optimizer", "all", "stream"]

_GATHERS = {
    "param_dtype": None,
    "float8": fsdp.sharding.Float8Gather(),
    "mxfp8": fsdp.sharding.MXFP8Gather(),
    "block_float8": fsdp.sharding.BlockFloat8Gather(),
    "nvfp4": fsdp.sharding.NVFP4Gather(),
}
_OFFLOADS = {
    None: None,
    "optimizer": fsdp.OffloadPolicy(),
    "all": fsdp.OffloadPolicy(params=True),
    "stream": fsdp.OffloadPolicy(params=True, stream_params=True),
}


_FIRST_SCALE = 2.0**16


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes and formats of a run.

    Attributes:
      param_dtype: Dtype that weights are gathered and computed in.
      param_gather: Format in which the matrices of layers are communicated.
      products: Format of the operands of projections of attention and MLPs.
      expert_products: Format of the operands of grouped products of experts.
      num_layers_at_start_in_bf16: Number of first layers that multiply in bfloat16
        although others multiply in float8 or mxfp8.
      num_layers_at_end_in_bf16: Number of last layers likewise.
      loss_scale: Initial factor of the loss; None for 65536 in float16, else none.
    """

    param_dtype: ParamDtype = "float32"
    param_gather: ParamGather = "param_dtype"
    products: Products = "param_dtype"
    expert_products: ExpertProducts = "param_dtype"
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    loss_scale: float | None = None

    def problems(self) -> list[str]:
        """Returns what is out of range or without effect, by option."""
        scale, wrong = self.loss_scale, []
        if scale is not None and not 1 <= scale < math.inf:
            wrong.append(f"--loss-scale {scale}: a finite number, at least 1")
        if scale is not None and self.param_dtype != "float16":
            wrong.append(
                f"--loss-scale {scale} is for --param-dtype float16, and this is "
                f"{self.param_dtype}"
            )
        narrow = [
            f"--{name.replace('_', '-')} {getattr(self, name)}"
            for name in ("products", "expert_products")
            if getattr(self, name) != "param_dtype"
        ]
        if self.param_dtype != "bfloat16":
            wrong += [
                f"{option} is for --param-dtype bfloat16, whose range it needs for all "
                f"else, and this is {self.param_dtype}"
                for option in narrow
            ]
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            number, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if number < 0:
                wrong.append(f"{option} {number}: at least 0")
            if number and not narrow:
                wrong.append(
                    f"{option} {number} is for --products float8 or mxfp8, and all "
                    f"layers multiply in {self.param_dtype} here"
                )
        return wrong

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
        if self.param_dtype != "float16":
            return None
        return fsdp.training.LossScale(self.loss_scale or _FIRST_SCALE)
