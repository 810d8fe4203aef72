"""A factor of the loss that keeps float16 gradients from vanishing."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class LossScale:
    """How the factor of the loss grows and shrinks.

    After `growth_interval` steps in a row whose gradients are finite it is multiplied
    by `growth_factor`. A step with one that is not is passed over, and the
    `hysteresis`-th of these without growth between them multiplies it by
    `backoff_factor`, as does each one after that.

    Args:
      initial_scale: Of the first step.
      growth_factor: At least 1; 1 for a scale that never grows.
      backoff_factor: Above 0, below 1.
      growth_interval: Steps.
      hysteresis: Steps; 1 shrinks at the first, as torch does.
      min_scale: It is never less.

    Source: torch.amp `GradScaler` (its defaults are these, and its hysteresis 1);
      Megatron `grad_scaler.py::DynamicGradScaler` (hysteresis 2, min_scale 1).
    """

    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0

    def __post_init__(self):
        """Checks the ranges; all offenders in one message."""
        wrong = {
            "initial_scale is at least min_scale": self.initial_scale < self.min_scale,
            "min_scale is above 0": self.min_scale <= 0,
            "growth_factor is at least 1": self.growth_factor < 1,
            "backoff_factor is between 0 and 1": not 0 < self.backoff_factor < 1,
            "growth_interval is at least 1": self.growth_interval < 1,
            "hysteresis is at least 1": self.hysteresis < 1,
        }
        if any(wrong.values()):
            said = "; ".join(rule for rule, broken in wrong.items() if broken)
            raise ValueError(f"{self}: {said}.")

    def start(self) -> ScaleState:
        """The state before the first step."""
        return ScaleState(
            jnp.float32(self.initial_scale),
            jnp.int32(0),
            jnp.int32(self.hysteresis),
        )

    def update(self, state: ScaleState, is_finite: Bool[Array, ""]) -> ScaleState:
        """The state after a step whose gradients are finite, or not."""
        left = jnp.where(is_finite, state.hysteresis, state.hysteresis - 1)
        good = jnp.where(is_finite, state.good_steps + 1, 0)
        grows, shrinks = good >= self.growth_interval, left <= 0
        smaller = jnp.maximum(state.scale * self.backoff_factor, self.min_scale)
        larger = state.scale * self.growth_factor
        # float32 ends: a scale that is infinite would never come back.
        larger = jnp.where(jnp.isfinite(larger), larger, state.scale)
        scale = jnp.where(
            is_finite, state.scale, jnp.where(shrinks, smaller, state.scale)
        )
        return ScaleState(
            jnp.where(grows, larger, scale),
            jnp.where(grows, 0, good),
            jnp.where(grows, self.hysteresis, jnp.maximum(left, 0)),
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("scale", "good_steps", "hysteresis"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class ScaleState:
    """Where a `LossScale` stands.

    Attributes:
      scale: The factor of the next step.
      good_steps: Steps in a row that were finite, since it last grew.
      hysteresis: Steps that may still fail before it shrinks.
    """

    scale: Float[Array, ""]
    good_steps: Int[Array, ""]
    hysteresis: Int[Array, ""]
