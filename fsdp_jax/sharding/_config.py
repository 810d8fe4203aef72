"""User options: placements, resharding, parallelism, replicated parameters."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fsdp_jax._option_types import check_options, is_whole
from fsdp_jax._tree import as_patterns
from fsdp_jax.lora._config import LoRAConfig
from fsdp_jax.sharding._offload import OffloadPolicy
from fsdp_jax.sharding._pipeline_config import PipelineConfig
from fsdp_jax.sharding._precision import MixedPrecisionPolicy


@dataclasses.dataclass(frozen=True)
class Placements:
    """Mesh axes that split one parameter, its gradient and its optimizer state.

    `FSDPConfig(placements=...)` takes any; the strategies are presets. The axes of
    `parameter` and of `gradient` are a prefix of those of `optimizer`, so that a gather
    concatenates contiguous pieces.

    Attributes:
      parameter: Axes that split it within a step, between its uses.
      gradient: Axes that split its gradient within a step, while it is accumulated over
        microbatches.
      optimizer: Axes that split it between steps and during the update. This is the
        only copy, in the main dtype. Where a model computes with a larger part of it,
        that part is made from this copy when the step begins, so no second copy can
        disagree with it.

    Raises:
      ValueError: If axes are not a tuple: the letters of a string would be axes.

    Examples:
      >>> placements = fsdp.Placements(*3 * [("dp_shard", "dp_outer")])
      >>> config = fsdp.FSDPConfig(placements=placements)
      >>> plan = fsdp.fully_shard(make_model, fsdp.make_mesh(dp_outer=2), config=config)
      >>> tuple(plan.specs["head"])
      (('dp_shard', 'dp_outer'),)

    Source: Megatron-FSDP `experimental::Placements` (one placement a mesh axis there;
      here the axes that shard, the others being replicated or, for gradients, partial).
    """

    parameter: tuple[str, ...]
    gradient: tuple[str, ...]
    optimizer: tuple[str, ...]

    def __post_init__(self):
        """Refuses axes that are no tuples: the letters of a string would be axes."""
        wrong = [
            f"{field.name}={axes!r}"
            for field in dataclasses.fields(self)
            if not isinstance(axes := getattr(self, field.name), tuple | list)
        ]
        if wrong:
            raise ValueError(
                f"Placements({', '.join(wrong)}) must be tuples of mesh axes, such as "
                "('dp_shard',)."
            )
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, tuple(getattr(self, field.name)))


@dataclasses.dataclass(frozen=True)
class FSDPConfig:
    """Options of `fully_shard`; the default is ZeRO-3 at the model's precision.

    Args:
      zero_dp_strategy: Arrays that are split over `dp_shard`, as a number or a name: 0
        `no_shard` nothing (DDP); 1 `optim` stored parameters and optimizer state; 2
        `optim_grads` also gradients while they are accumulated; 3 `optim_grads_params`
        also parameters within the step, unit by unit.
      outer_dp_sharding_strategy: Arrays that are split over `dp_outer` as well:
        `no_shard` nothing (HSDP), `optim` stored parameters and optimizer state (HFSDP;
        needs strategy 3).
      placements: Mesh axes that replace the two strategies, e.g.
        `Placements(*3 * [("dp_shard", "dp_outer")])` for one flat ZeRO-3.
      overlap_outer: Where gradients still have to be reduced over an axis after the
        last microbatch (all but ZeRO-2 and -3 on one level), reduce them unit by unit
        in the backward of that microbatch, which is then a second copy of the model in
        the program. False: after the loop, in one smaller program.
      prefetch: Number of units whose weights are gathered ahead of the one that
        computes, forward and backward, in a model that runs its units one after the
        other or in a scan (`fsdp_jax.scan`, `jax.lax.scan`, `nnx.scan`, `nn.scan`); at
        most `prefetch + 1` of them are unsharded at once. Units that one iteration of
        a scan runs count as one. 0 leaves the order of collectives to XLA, which may
        gather all units at once, and gathers the units of a scan when they begin.
      reshard_after_forward: Free a unit's unsharded weights after its forward and
        gather them again for its backward. False keeps them: one gather a step fewer,
        and one unsharded unit more memory for each unit.
      mp_policy: Dtypes of weights and gradients.
      remat_policy: `jax.checkpoint` policy for the activations that a unit saves for
        backward, e.g. `jax.checkpoint_policies.dots_saveable`. None saves whatever does
        not depend on the unit's weights alone. Arrays in float8 are never saved but
        cast again, since `jax.checkpoint` makes NaN of large ones, and complex ones
        computed again, since it cannot save them. Needs
        `reshard_after_forward=True`.
      replicated: Path patterns (`"layers.*.norm.scale"`, one `*` a path component;
        `"**.scale"`, any number of them) of parameters that are replicated on every
        device.
      frozen: Path patterns of parameters that are not trained: they are stored in their
        compute dtype and have neither gradient nor optimizer state.
      lora: Low-rank factors that are trained beside some weights, all others frozen.
        Parameters are then `{"base", "lora"}`, see `add_lora` and `merge_lora`.
      tensor_parallel: Path pattern -> the dim that is split over the mesh axis `tp`,
        counted in the unit's own slice of the weight (`{"layers.*.up.kernel": 1}`; -1
        is the last; the first pattern that a path matches). If data axes find no other
        dim, or would need padding, both split this one. A single dim that they do not
        divide together is split over data axes alone; the plan shows it.
      expert_parallel: Path pattern -> the dim that counts experts, counted in the same
        way (`{"layers.*.experts": 0}`). It is split over the mesh axis `ep`: each rank
        there computes with its own experts only, which are gathered, and their
        gradients reduced, over the other data axes. The model has to send tokens to
        their experts (`fsdp_jax.ops.expert_parallel_dispatch`).
      context_parallel: Path pattern of a batch's leaves -> the sequence dim
        (`{"tokens": 1, "targets": 1}`; `{"*": 1}` for all, or where the batch is a
        single array). It is split over the mesh axis `cp`; other leaves are replicated
        there. The model has to attend across ranks (`fsdp_jax.ops.ring_attention`,
        `zigzag`, `zigzag_positions`). The loss is the mean of the ranks' losses: if
        they count different numbers of tokens, use `calculate_per_token_loss`.
      sync_batch_norm: Compute the statistics of BatchNorm (flax.nnx, linen, equinox)
        over the rows of all ranks in a microbatch, as on one device. False: over the
        rank's own rows; running statistics are then averaged over ranks. A BatchNorm
        that names mesh axes itself (`axis_name="dp_shard"`) keeps its own.
      min_shard_elements: Parameters with fewer elements are replicated; the plan shows
        it.
      offload: Arrays that are stored in host memory instead of device memory, e.g.
        `OffloadPolicy()` for the optimizer state. None: none. For activations use a
        `remat_policy` of jax's that offloads.
      pipeline: Schedule of the pipeline stages, for a mesh with several devices on
        `pp`. The model's stack of units, which `fsdp_jax.scan` runs, is split over the
        stages; of several stacks, the one that `PipelineConfig(stack=)` names. All
        other parameters are stored split over `pp` too, and those in no unit are
        gathered once a step.

    Raises:
      ValueError: If a strategy is unknown, options contradict each other, or one would
        have no effect.

    Examples:
      >>> config = fsdp.FSDPConfig(zero_dp_strategy="optim", replicated=("head",))
      >>> plan = fsdp.fully_shard(make_model, mesh, [fsdp.Stacked("layers")], config)
      >>> {param.name: param.split.dim for param in plan.param_plans}
      {'head': None, 'layers.w': 1}

    Source: FSDP2 `fully_shard(reshard_after_forward=, mp_policy=)`.
    """

    zero_dp_strategy: int | str = 3
    outer_dp_sharding_strategy: int | str = 0
    placements: Placements | None = None
    overlap_outer: bool = True
    prefetch: int = 1
    reshard_after_forward: bool = True
    mp_policy: MixedPrecisionPolicy = dataclasses.field(
        default_factory=MixedPrecisionPolicy
    )
    remat_policy: Callable[..., bool] | None = None
    replicated: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    lora: LoRAConfig | None = None
    # A mapping has no hash: these three are left out of that of the config.
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
    offload: OffloadPolicy | None = None
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)

    def __post_init__(self):
        """Validates the options; one that would have no effect raises."""
        check_options(self)
        strategy = _named("zero_dp_strategy", self.zero_dp_strategy, ZERO_DP_STRATEGIES)
        outer = _named(
            "outer_dp_sharding_strategy",
            self.outer_dp_sharding_strategy,
            OUTER_STRATEGIES,
        )
        if outer == "optim" and strategy != "optim_grads_params":
            raise ValueError(
                "FSDPConfig(outer_dp_sharding_strategy='optim') splits the shards of "
                "zero_dp_strategy='optim_grads_params' again, but "
                f"zero_dp_strategy={strategy!r}. Use strategy 3, or 'no_shard' for the "
                "outer one."
            )
        object.__setattr__(self, "zero_dp_strategy", strategy)
        object.__setattr__(self, "outer_dp_sharding_strategy", outer)
        if self.placements and (strategy, outer) != ("optim_grads_params", "no_shard"):
            raise ValueError(
                f"FSDPConfig(placements=...) replaces zero_dp_strategy={strategy!r} "
                f"and outer_dp_sharding_strategy={outer!r}: drop either it or these."
            )
        for option in ("replicated", "frozen"):
            patterns = as_patterns("FSDPConfig", option, getattr(self, option))
            object.__setattr__(self, option, patterns)
        if self.lora is not None and self.frozen:
            raise ValueError(
                f"FSDPConfig(lora=..., frozen={self.frozen}): with LoRA all of the "
                "model is frozen but LoRAConfig(modules_to_save=...). Drop frozen."
            )
        self._check_numbers()
        self._check_remat()
        if (
            strategy == "no_shard"
            and self.mp_policy.param_gather
            and not self.placements
        ):
            raise ValueError(
                "FSDPConfig(zero_dp_strategy='no_shard') gathers no weights, so that "
                f"param_gather={self.mp_policy.param_gather} would do nothing: drop it."
            )

    def _check_numbers(self) -> None:
        if self.prefetch < 0:
            raise ValueError(
                f"FSDPConfig(prefetch={self.prefetch}) counts the units that are "
                "gathered ahead: use 1, or 0 to leave the order to XLA."
            )
        if self.min_shard_elements < 0:
            raise ValueError(
                f"FSDPConfig(min_shard_elements={self.min_shard_elements}) counts "
                "elements: use 0 to shard everything."
            )

    def _check_remat(self) -> None:
        for name in _MAKE_POLICIES:
            if self.remat_policy is getattr(jax.checkpoint_policies, name):
                raise ValueError(
                    f"FSDPConfig(remat_policy={name}) makes policies and is none: call "
                    f"it, jax.checkpoint_policies.{name}(...)."
                )
        if self.remat_policy is not None and not callable(self.remat_policy):
            raise ValueError(
                f"FSDPConfig(remat_policy={self.remat_policy!r}) is no policy. Use one "
                "of jax.checkpoint_policies, such as dots_with_no_batch_dims_saveable."
            )
        if self.remat_policy is not None and not self.reshard_after_forward:
            raise ValueError(
                "FSDPConfig(remat_policy=...) decides what a resharded unit saves, and "
                "reshard_after_forward=False saves everything: drop one of the two."
            )


# Given the arguments of a policy they fail within jax, or return what counts as true.
_MAKE_POLICIES = (
    "offload_dot_with_no_batch_dims",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_from_both_policies",
    "save_only_these_names",
)

ZERO_DP_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Megatron-FSDP's names of ZeRO 0 to 3, in this order."""

OUTER_STRATEGIES = ("no_shard", "optim")
"""Sharding over `dp_outer`: none (HSDP), or of stored arrays (HFSDP)."""


def _named(option: str, value: Any, names: tuple[str, ...]) -> str:
    if is_whole(value) and 0 <= operator.index(value) < len(names):
        return names[operator.index(value)]
    if not isinstance(value, str) or value not in names:
        known = ", ".join(f"{number} or {name!r}" for number, name in enumerate(names))
        raise ValueError(f"FSDPConfig({option}={value!r}) is unknown. Use {known}.")
    return str(value)
