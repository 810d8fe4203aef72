"""What a user may choose: precision, resharding, what stays whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The four dtypes of a parameter's life, each independent of the others.

    Weights rest and are updated in `main_params_dtype`, travel and compute in
    `param_dtype`; gradients travel in `grad_comm_dtype` and are summed and kept in
    `main_grads_dtype`. Only floating-point parameters are concerned.

    Args:
      param_dtype: What a weight is cast to *before* it is gathered, so that the wire
        carries this dtype. None: the dtype in which the model makes it.
      main_params_dtype: What the optimizer reads and writes. None: the model's dtype,
        but at least float32.
      main_grads_dtype: What gradients are accumulated in and handed to the optimizer
        in. None: `main_params_dtype`.
      grad_comm_dtype: What gradients are cast to before they are reduced. None:
        `main_grads_dtype`.
      reduce_scatter_with_fp32_accumulation: Send gradients in `grad_comm_dtype`, but
        add them up in `main_grads_dtype`: each rank receives the others' pieces (an
        all-to-all, the same bytes as a reduce-scatter) and sums them itself. Without,
        the sum of n ranks is rounded to `grad_comm_dtype` up to n - 1 times. An
        all-reduce (between HSDP's replicas, and of what stays whole) has no such form
        and travels in `main_grads_dtype` then. Needs a narrower `grad_comm_dtype`.

    Source: Megatron-FSDP `mixed_precision.py::MixedPrecisionPolicy` for the last three
      (there None means the parameter's own dtype for main gradients; here gradients
      are accumulated in at least float32 unless told otherwise); `param_dtype` is
      FSDP2's; `reduce_scatter_with_fp32_accumulation` is that of Megatron's
      `DistributedDataParallelConfig`.
    """

    param_dtype: DTypeLike | None = None
    main_params_dtype: DTypeLike | None = None
    main_grads_dtype: DTypeLike | None = None
    grad_comm_dtype: DTypeLike | None = None
    reduce_scatter_with_fp32_accumulation: bool = False

    def __post_init__(self):
        """Refuses what gradients cannot be made of, all offenders at once."""
        chosen = {
            field.name: jnp.dtype(value)
            for field in dataclasses.fields(self)
            if field.name.endswith("_dtype")
            and (value := getattr(self, field.name)) is not None
        }
        wrong = [
            f"{name}={dtype.name}"
            for name, dtype in chosen.items()
            if not jnp.issubdtype(dtype, jnp.floating)
        ]
        if wrong:
            raise ValueError(
                "MixedPrecisionPolicy takes floating-point dtypes, got "
                f"{', '.join(wrong)}. Use e.g. jnp.bfloat16 or jnp.float32."
            )
        wide = jnp.dtype(self.main_grads_dtype or self.main_params_dtype or jnp.float32)
        wire = jnp.dtype(self.grad_comm_dtype or wide)
        if self.reduce_scatter_with_fp32_accumulation and (
            wire.itemsize >= wide.itemsize
        ):
            raise ValueError(
                "MixedPrecisionPolicy(reduce_scatter_with_fp32_accumulation=True) adds "
                f"up in main_grads_dtype ({wide.name}) what travels in grad_comm_dtype "
                f"({wire.name}), which is no narrower. Set the latter to bfloat16."
            )

    def resolve(self, dtype: DTypeLike) -> Precision:
        """Fills in every None for a parameter that the model makes in `dtype`."""
        model = jnp.dtype(dtype)
        if not jnp.issubdtype(
            model, jnp.floating
        ):  # Complex: the policy is not for it.
            return Precision(model, model, model, model, accumulate_wide=False)
        main = jnp.dtype(
            self.main_params_dtype or jnp.promote_types(model, jnp.float32)
        )
        main_grads = jnp.dtype(self.main_grads_dtype or main)
        return Precision(
            param=jnp.dtype(self.param_dtype or model),
            main_params=main,
            main_grads=main_grads,
            grad_comm=jnp.dtype(self.grad_comm_dtype or main_grads),
            accumulate_wide=self.reduce_scatter_with_fp32_accumulation,
        )


@dataclasses.dataclass(frozen=True)
class Precision:
    """A `MixedPrecisionPolicy` resolved for one parameter: its concrete dtypes."""

    param: jnp.dtype
    main_params: jnp.dtype
    main_grads: jnp.dtype
    grad_comm: jnp.dtype
    accumulate_wide: bool


@dataclasses.dataclass(frozen=True)
class FSDPConfig:
    """How `fully_shard` shards; the defaults are ZeRO-3 at the model's own precision.

    Args:
      zero_dp_strategy: What is split over `dp_shard`, as a number or a name: 0
        `no_shard` nothing (DDP), 1 `optim` the parameters and their optimizer state at
        rest, 2 `optim_grads` also gradients while they accumulate, 3
        `optim_grads_params` also parameters within the step, unit by unit.
      outer_dp_sharding_strategy: What is split over `dp_outer` besides: `no_shard`
        nothing (HSDP), `optim` the parameters and their optimizer state at rest
        (HFSDP; needs strategy 3).
      reshard_after_forward: Let a unit's whole weights go after its forward and gather
        them again for its backward. False keeps them: one gather a step fewer, one
        whole unit more memory for each unit.
      mp_policy: The dtypes of weights and gradients.
      remat_policy: What of a unit's own activations is saved for backward, as a
        `jax.checkpoint` policy, e.g. `jax.checkpoint_policies.dots_saveable`. None
        saves whatever does not depend on the unit's weights alone. Needs
        `reshard_after_forward=True`.
      replicated: Path patterns (`"layers.*.norm.scale"`, one `*` a path component) of
        parameters that stay whole on every device.
      min_shard_elements: Parameters with fewer elements stay whole; shown in the plan.

    Source: FSDP2 `fully_shard(reshard_after_forward=, mp_policy=)`.
    """

    zero_dp_strategy: int | str = 3
    outer_dp_sharding_strategy: int | str = 0
    reshard_after_forward: bool = True
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    remat_policy: Callable[..., bool] | None = None
    replicated: tuple[str, ...] = ()
    min_shard_elements: int = 0

    def __post_init__(self):
        """Refuses combinations in which an option would do nothing."""
        strategy = _named("zero_dp_strategy", self.zero_dp_strategy, ZERO_DP_STRATEGIES)
        outer = _named(
            "outer_dp_sharding_strategy",
            self.outer_dp_sharding_strategy,
            OUTER_STRATEGIES,
        )
        if outer == "optim" and strategy != "optim_grads_params":
            raise ValueError(
                "FSDPConfig(outer_dp_sharding_strategy='optim') splits further what "
                "zero_dp_strategy='optim_grads_params' has split, but zero_dp_strategy="
                f"{strategy!r}. Use strategy 3, or 'no_shard' for the outer one."
            )
        object.__setattr__(self, "zero_dp_strategy", strategy)
        object.__setattr__(self, "outer_dp_sharding_strategy", outer)
        if isinstance(self.replicated, str):
            raise ValueError(
                f"FSDPConfig(replicated={self.replicated!r}) must be a sequence of "
                f"path patterns: write replicated=({self.replicated!r},)."
            )
        if self.min_shard_elements < 0:
            raise ValueError(
                f"FSDPConfig(min_shard_elements={self.min_shard_elements}) counts "
                "elements: use 0 to shard everything."
            )
        if self.remat_policy is not None and not self.reshard_after_forward:
            raise ValueError(
                "FSDPConfig(remat_policy=...) decides what a resharded unit saves, and "
                "reshard_after_forward=False saves everything: drop one of the two."
            )
        object.__setattr__(self, "replicated", tuple(self.replicated))


ZERO_DP_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Megatron-FSDP's names of ZeRO 0 to 3, in this order."""

OUTER_STRATEGIES = ("no_shard", "optim")
"""What HSDP and HFSDP do on `dp_outer`."""


def _named(option: str, value: int | str, names: tuple[str, ...]) -> str:
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    if value not in names:
        known = ", ".join(f"{number} or {name!r}" for number, name in enumerate(names))
        raise ValueError(f"FSDPConfig({option}={value!r}) is unknown. Use {known}.")
    return str(value)
