"""What a user may choose: placements, precision, resharding, what stays whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax.typing import DTypeLike

from fsdp_jax._tree import matches
from fsdp_jax.lora._config import LoRA
from fsdp_jax.sharding._low_precision import ParamGather
from fsdp_jax.sharding._offload import Offload
from fsdp_jax.sharding._pipeline_config import Pipeline


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
      stochastic_rounding: With `main_params_dtype=jnp.bfloat16`, round each updated
        weight up or down at random, to the nearer neighbour more often, so that updates
        too small for bfloat16 are not lost on the mean. The optimizer's state is in
        float32 then. Any mesh rounds alike.
      param_name_patterns_for_fp32_local_accumulation: Path patterns (`"*.router.*"`, or
        `"all"`) of parameters whose gradients are accumulated over microbatches, and
        handed to the optimizer, in float32, while the others use a narrower
        `main_grads_dtype`. On the wire nothing changes.

      param_name_patterns_in_fp32: Path patterns of parameters that are gathered and
        compute in float32 whatever `param_dtype` is: a router's bias, say, which moves
        by steps that bfloat16 would lose.

    Source: Megatron-FSDP `mixed_precision.py::MixedPrecisionPolicy` for the last three
      (there None means the parameter's own dtype for main gradients; here gradients
      are accumulated in at least float32 unless told otherwise); `param_dtype` is
      FSDP2's; the next two are those of Megatron's `DistributedDataParallelConfig`
      (patterns there are `fnmatch`ed against the whole name).
    """

    param_dtype: DTypeLike | None = None
    main_params_dtype: DTypeLike | None = None
    main_grads_dtype: DTypeLike | None = None
    grad_comm_dtype: DTypeLike | None = None
    reduce_scatter_with_fp32_accumulation: bool = False
    stochastic_rounding: bool = False
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    param_name_patterns_in_fp32: tuple[str, ...] = ()
    param_gather: ParamGather | None = None

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
        if self.stochastic_rounding and chosen.get("main_params_dtype") != jnp.bfloat16:
            raise ValueError(
                "MixedPrecisionPolicy(stochastic_rounding=True) is of weights in "
                f"bfloat16, and main_params_dtype={self.main_params_dtype}. Set that "
                "to jnp.bfloat16, or drop it."
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
        patterns = _patterns(
            "MixedPrecisionPolicy",
            "param_name_patterns_for_fp32_local_accumulation",
            self.param_name_patterns_for_fp32_local_accumulation,
        )
        if patterns and wide.itemsize >= 4:
            raise ValueError(
                f"MixedPrecisionPolicy({patterns=}): these parameters would accumulate "
                "in float32 what the others accumulate in main_grads_dtype, which is "
                f"{wide.name} already. Set main_grads_dtype=jnp.bfloat16, or drop it."
            )
        object.__setattr__(
            self, "param_name_patterns_for_fp32_local_accumulation", patterns
        )
        option = "param_name_patterns_in_fp32"
        kept = _patterns("MixedPrecisionPolicy", option, getattr(self, option))
        object.__setattr__(self, option, kept)

    def resolve(self, name: str, dtype: DTypeLike) -> Precision:
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
        widened = any(
            pattern == "all" or matches(pattern, name)
            for pattern in self.param_name_patterns_for_fp32_local_accumulation
        )
        is_kept = any(matches(p, name) for p in self.param_name_patterns_in_fp32)
        return Precision(
            param=jnp.dtype(jnp.float32 if is_kept else self.param_dtype or model),
            main_params=main,
            main_grads=jnp.dtype(jnp.float32) if widened else main_grads,
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
class Placements:
    """The mesh axes that split one parameter, at each station of its life.

    `FSDPConfig(placements=...)` takes any; the strategies are presets of it. The axes
    of `parameter` and of `gradient` are the first ones of `optimizer`, so that what a
    gather brings together is contiguous.

    Attributes:
      parameter: Within a step, between its uses.
      gradient: Within a step, while gradients accumulate over microbatches.
      optimizer: Between steps and while the optimizer updates it: the only copy, in the
        main dtype. Where a model computes with more of it, that is made from this one
        when the step begins, so no second copy can disagree with it.

    Source: Megatron-FSDP `experimental::Placements` (one placement a mesh axis there;
      here the axes that shard, the others being replicated or, for gradients, partial).
    """

    parameter: tuple[str, ...]
    gradient: tuple[str, ...]
    optimizer: tuple[str, ...]


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
      placements: Mesh axes of your own in the place of the two strategies, e.g.
        `Placements(*3 * [("dp_shard", "dp_outer")])` for one flat ZeRO-3.
      overlap_outer: Where gradients are still to be reduced over an axis when the
        microbatches are through (all but ZeRO-2 and -3 on one level), do it unit by
        unit in the backward of the last microbatch, which is then a second copy of the
        model in the program. False: after the loop, in one smaller program.
      reshard_after_forward: Let a unit's whole weights go after its forward and gather
        them again for its backward. False keeps them: one gather a step fewer, one
        whole unit more memory for each unit.
      mp_policy: The dtypes of weights and gradients.
      remat_policy: What of a unit's own activations is saved for backward, as a
        `jax.checkpoint` policy, e.g. `jax.checkpoint_policies.dots_saveable`. None
        saves whatever does not depend on the unit's weights alone. Arrays in float8 are
        never saved but cast again, since `jax.checkpoint` makes NaN of large ones.
        Needs `reshard_after_forward=True`.
      replicated: Path patterns (`"layers.*.norm.scale"`, one `*` a path component) of
        parameters that stay whole on every device.
      frozen: Path patterns of parameters that are not trained: they rest in the dtype
        they compute in and have neither gradient nor optimizer state.
      lora: Trains factors beside some weights and freezes all others. Parameters are
        then `{"base", "lora"}`, see `add_lora` and `merge_lora`.
      tensor_parallel: Path pattern -> the dim that is split over the mesh axis `tp`, as
        the model's own slice of the weight counts it (`{"layers.*.up.kernel": 1}`; -1
        is the last). Where data axes find no other dim, or zeros would be needed, both
        split this one. A single dim that they do not divide together is split over data
        axes alone; the plan shows it.
      expert_parallel: Path pattern -> the dim that counts experts, in the same way
        (`{"layers.*.experts": 0}`). It is split over the mesh axis `ep`, where the
        model computes with its own experts alone, which are gathered, and their
        gradients reduced, over the other data axes. The model has to bring tokens to
        their experts (`fsdp_jax.ops.expert_parallel_dispatch`).
      context_parallel: Path pattern of a batch's leaves -> the dim that is the sequence
        (`{"tokens": 1, "targets": 1}`; `{"*": 1}` for all, or where the batch is a
        single array). It is split over the mesh axis `cp`; other leaves each rank there
        has whole. The model has to see across ranks (`fsdp_jax.ops.ring_attention`,
        `zigzag`, `zigzag_positions`). The loss is the mean of the ranks': where they
        count different numbers of tokens, `calculate_per_token_loss`.
      sync_batch_norm: Let BatchNorm (flax.nnx, linen, equinox) take its statistics over
        the rows that all ranks have in a microbatch, as on one device. False: over the
        rank's own rows; running statistics are then averaged over ranks. A BatchNorm
        that names mesh axes itself (`axis_name="dp_shard"`) keeps to these.
      min_shard_elements: Parameters with fewer elements stay whole; shown in the plan.
      offload: What rests in the host's memory instead of the device's, e.g.
        `Offload()` for the optimizer state. None: nothing. For activations take a
        `remat_policy` of jax's that offloads.
      pipeline: How stages take turns, where the mesh has more than one on `pp`. The
        model's stack of units, which `fsdp_jax.scan` runs, is split over these, of
        several the one that `Pipeline(stack=)` names; all else rests split over them
        too, and what is in no unit is gathered once a step.

    Source: FSDP2 `fully_shard(reshard_after_forward=, mp_policy=)`.
    """

    zero_dp_strategy: int | str = 3
    outer_dp_sharding_strategy: int | str = 0
    placements: Placements | None = None
    overlap_outer: bool = True
    reshard_after_forward: bool = True
    mp_policy: MixedPrecisionPolicy = dataclasses.field(
        default_factory=MixedPrecisionPolicy
    )
    remat_policy: Callable[..., bool] | None = None
    replicated: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    lora: LoRA | None = None
    tensor_parallel: Mapping[str, int] = dataclasses.field(
        default_factory=dict, hash=False
    )
    expert_parallel: Mapping[str, int] = dataclasses.field(
        default_factory=dict, hash=False
    )
    context_parallel: Mapping[str, int] = dataclasses.field(
        default_factory=dict, hash=False
    )
    sync_batch_norm: bool = True
    min_shard_elements: int = 0
    offload: Offload | None = None
    pipeline: Pipeline = dataclasses.field(default_factory=Pipeline)

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
        if self.placements and (strategy, outer) != ("optim_grads_params", "no_shard"):
            raise ValueError(
                f"FSDPConfig(placements=...) stands in the place of zero_dp_strategy="
                f"{strategy!r} and outer_dp_sharding_strategy={outer!r}: drop either "
                "it or these."
            )
        for option in ("replicated", "frozen"):
            patterns = _patterns("FSDPConfig", option, getattr(self, option))
            object.__setattr__(self, option, patterns)
        if self.lora is not None and self.frozen:
            raise ValueError(
                f"FSDPConfig(lora=..., frozen={self.frozen}): with LoRA all of the "
                "model is frozen but LoRA(modules_to_save=...). Drop frozen."
            )
        if self.min_shard_elements < 0:
            raise ValueError(
                f"FSDPConfig(min_shard_elements={self.min_shard_elements}) counts "
                "elements: use 0 to shard everything."
            )
        if (
            strategy == "no_shard"
            and self.mp_policy.param_gather
            and not self.placements
        ):
            raise ValueError(
                "FSDPConfig(zero_dp_strategy='no_shard') gathers no weights, so that "
                f"param_gather={self.mp_policy.param_gather} would do nothing: drop it."
            )
        if self.remat_policy is not None and not self.reshard_after_forward:
            raise ValueError(
                "FSDPConfig(remat_policy=...) decides what a resharded unit saves, and "
                "reshard_after_forward=False saves everything: drop one of the two."
            )


ZERO_DP_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Megatron-FSDP's names of ZeRO 0 to 3, in this order."""

OUTER_STRATEGIES = ("no_shard", "optim")
"""What HSDP and HFSDP do on `dp_outer`."""


def _patterns(owner: str, option: str, patterns: object) -> tuple[str, ...]:
    """The patterns as a tuple; a lone string would be taken letter by letter."""
    if isinstance(patterns, str):
        raise ValueError(
            f"{owner}({option}={patterns!r}) must be a sequence of path patterns: "
            f"write {option}=({patterns!r},)."
        )
    return tuple(patterns)  # pyright: ignore[reportArgumentType]


def _named(option: str, value: int | str, names: tuple[str, ...]) -> str:
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    if value not in names:
        known = ", ".join(f"{number} or {name!r}" for number, name in enumerate(names))
        raise ValueError(f"FSDPConfig({option}={value!r}) is unknown. Use {known}.")
    return str(value)
