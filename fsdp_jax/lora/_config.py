"""LoRA options: weights with trained factors, and the format of the frozen base."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from fsdp_jax._option_types import check_options

BaseFormat = Literal["int8", "nf4"]
"""Formats in which a frozen base may be stored: see `_blockwise_quantization`."""


@dataclasses.dataclass(frozen=True)
class LoRATarget:
    """Weights that get factors, and which of their dims are inputs.

    Args:
      pattern: Path pattern, one `*` a path component.
      num_in: Number of the weight's dims, in its unit, that are inputs: 1 of
        `[embed, heads, head_dim]`, 2 of `[heads, head_dim, embed]`. None: 1, for
        weights of 2 dims.
      out_first: True if outputs come first, as in torch's and equinox's `[out, in]`.
      rank: Rank of these weights' factors; None for `LoRA.rank`.
      alpha: Numerator of these weights' scale; None for `LoRA.alpha`.
    """

    pattern: str
    num_in: int | None = None
    out_first: bool = False
    rank: int | None = None
    alpha: float | None = None


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adaptation: a frozen model with trained factors beside some weights.

    A weight `w` computes as `w + scale * a @ b`: `a` of shape `[*in, rank]` is drawn
    uniformly within `1 / sqrt(in)`, and `b` of shape `[rank, *out]` is zero at first.
    Where the model multiplies by the weight, the sum is not computed: the input is
    multiplied by `a` and `b` in float32. Elsewhere (a convolution, an embedding, a loop
    inside the unit) the sum is computed when the unit is entered, and freed with it.

    Args:
      rank: Number of columns of `a`.
      targets: Weights that get factors; a lone pattern is a matrix `[in, out]`.
      alpha: Numerator of `scale`, which is `alpha / rank`. None: `rank`, so that
        `scale` is 1.
      use_rslora: Use `alpha / sqrt(rank)` for `scale` instead.
      dropout: Share of the inputs of `a` that are zero in a training step, the others
        scaled up.
      modules_to_save: Path patterns of weights that are trained themselves.
      base: Format in which weights of units with at least 2 dims are stored: "nf4" in 4
        bits, "int8" in 8, with one float32 scale for each 64 elements. They are
        gathered in this format and dequantized where their unit is entered. None:
        compute dtype.

    Raises:
      ValueError: If there are no targets, or a rank, `alpha`, `dropout` or `base` is
        out of range; all offenders in one message.

    Examples:
      >>> config = fsdp.FSDPConfig(lora=fsdp.LoRAConfig(4, targets=["layers.w"]))
      >>> plan = fsdp.fully_shard(make_model, mesh, [fsdp.Stacked("layers")], config)
      >>> jax.tree.map(jnp.shape, plan.params["lora"])
      {'layers.w': {'lora_a': (2, 16, 4), 'lora_b': (2, 4, 16)}}

    Source: huggingface/peft `LoraConfig`; Hu et al. 2021 (LoRA); Dettmers et al. 2023
      (QLoRA; without its second quantisation, of the scales).
    """

    rank: int
    targets: Sequence[str | LoRATarget]
    alpha: float | None = None
    use_rslora: bool = False
    dropout: float = 0.0
    modules_to_save: tuple[str, ...] = ()
    base: BaseFormat | None = None

    def __post_init__(self):
        """Validates the ranges; all offenders in one message."""
        if isinstance(self.targets, str) or isinstance(self.modules_to_save, str):
            raise ValueError(
                f"LoRAConfig(targets={self.targets!r}, "
                f"modules_to_save={self.modules_to_save!r}): each must be a sequence "
                "of path patterns."
            )
        check_options(self)
        object.__setattr__(self, "targets", tuple(self.targets))
        if other := [t for t in self.targets if not isinstance(t, str | LoRATarget)]:
            raise ValueError(
                f"LoRAConfig(targets={other}): each is a path pattern or a LoRATarget."
            )
        object.__setattr__(self, "modules_to_save", tuple(self.modules_to_save))
        targets = self.all_targets
        wrong = [] if targets else ["targets is empty"]
        wrong += [
            f"{target.pattern!r}: rank={self.rank_of(target)}, at least 1"
            for target in targets
            if self.rank_of(target) < 1
        ]
        wrong += [
            f"{target.pattern!r}: alpha={alpha}, a finite number above 0"
            for target in targets
            if not 0 < (alpha := self._alpha(target)) < math.inf
        ]
        wrong += [
            f"{target.pattern!r}: num_in={target.num_in}, at least 1"
            for target in targets
            if target.num_in is not None and target.num_in < 1
        ]
        if not 0 <= self.dropout < 1:
            wrong.append(f"dropout={self.dropout}, at least 0 and below 1")
        if wrong:
            raise ValueError(f"LoRA: {'; '.join(wrong)}.")

    @property
    def all_targets(self) -> tuple[LoRATarget, ...]:
        """The targets, each lone pattern as a `LoRATarget`."""
        return tuple(
            LoRATarget(target) if isinstance(target, str) else target
            for target in self.targets
        )

    def rank_of(self, target: LoRATarget) -> int:
        """Returns the rank of a target's factors."""
        return self.rank if target.rank is None else target.rank

    def scale_of(self, target: LoRATarget) -> float:
        """Returns the factor of the product of a target's factors."""
        rank = self.rank_of(target)
        return self._alpha(target) / (math.sqrt(rank) if self.use_rslora else rank)

    def _alpha(self, target: LoRATarget) -> float:
        alpha = self.alpha if target.alpha is None else target.alpha
        return self.rank_of(target) if alpha is None else alpha
