"""Model FLOPs utilization of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import fsdp_jax as fsdp
from fsdp_jax.planner import GPUS, model_flops


@dataclasses.dataclass(frozen=True)
class Utilization:
    """FLOPs of a step, and the peak that they are compared with.

    Attributes:
      flops: FLOPs of a global batch, without recomputation.
      peak: FLOP/s of all devices together.
    """

    flops: float
    peak: float

    def of(self, seconds: float) -> float:
        """Returns the model FLOPs utilization of a step, of 1.

        Args:
          seconds: Duration of the step.
        """
        return self.flops / seconds / self.peak


def peak_flops(devices: Sequence[Any], tflops: float | None) -> float | None:
    """Returns the peak FLOP/s of a device; None if it is unknown.

    Args:
      devices: Devices of the run, of one kind.
      tflops: Peak from the command line, in TFLOP/s; None for that of the data sheet,
        16-bit and dense, of a GPU that the planner knows.
    """
    if tflops is not None:
        return tflops * 1e12
    kinds = {gpu.description: gpu.cost.peak_flops for gpu in GPUS.values()}
    return kinds.get(devices[0].device_kind)


def utilization_of(
    plan: fsdp.Plan, loss_fn: Any, batch: Any, tflops: float | None, *, per_token: bool
) -> Utilization | None:
    """Counts the FLOPs of a step; None if the peak of the devices is unknown.

    Args:
      plan: Plan of the model.
      loss_fn: Loss function, which returns metrics too.
      batch: Abstract global batch.
      tflops: Peak of a device in TFLOP/s; None for that of a known GPU.
      per_token: Whether the loss function returns a sum and a count.
    """
    devices = list(plan.mesh.devices.flat)
    peak = peak_flops(devices, tflops)
    if peak is None:
        return None
    flops = model_flops(
        plan, loss_fn, batch, has_aux=True, calculate_per_token_loss=per_token
    )
    return Utilization(flops, peak * len(devices))
