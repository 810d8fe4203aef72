"""Dynamic loss scaling, which keeps float16 gradients from underflowing."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fsdp_jax._option_types import check_options


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale: its growth and backoff rules.

    After `growth_interval` consecutive steps with finite gradients the scale is
    multiplied by `growth_factor`. A step with a non-finite gradient is skipped; the
    `hysteresis`-th such step since the last growth multiplies the scale by
    `backoff_factor`, and so does each one after it.

    Args:
      initial_scale: Scale of the first step.
      growth_factor: Factor of growth, at least 1; 1 for a scale that never grows.
      backoff_factor: Factor of backoff, above 0 and below 1.
      growth_interval: Number of consecutive finite steps before the scale grows.
      hysteresis: Number of non-finite steps before the scale shrinks; 1 shrinks at the
        first, as torch does.
      min_scale: Lower bound of the scale.

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
        """Validates the ranges and reports all violations in one message."""
        check_options(self)
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
        """Returns the state before the first step."""
        return ScaleState(
            jnp.float32(self.initial_scale),
            jnp.int32(0),
            jnp.int32(self.hysteresis),
        )

    def update(self, state: ScaleState, is_finite: Bool[Array, ""]) -> ScaleState:
        """Returns the state after a step.

        Args:
          state: State before the step.
          is_finite: Whether all gradients of the step are finite.
        """
        # Branch-free, since `is_finite` is known on the device only.
        left = jnp.where(is_finite, state.hysteresis, state.hysteresis - 1)
        good = jnp.where(is_finite, state.good_steps + 1, 0)
        grows, shrinks = good >= self.growth_interval, left <= 0
        smaller = jnp.maximum(state.scale * self.backoff_factor, self.min_scale)
        larger = state.scale * self.growth_factor
        # Growth past the float32 maximum would be infinite, and no backoff could undo
        # it.
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
    """State of a `LossScale`.

    Attributes:
      scale: Scale of the next step.
      good_steps: Number of consecutive finite steps since the scale last grew.
      hysteresis: Number of non-finite steps left before the scale shrinks.
    """

    scale: Float[Array, ""]
    good_steps: Int[Array, ""]
    hysteresis: Int[Array, ""]
