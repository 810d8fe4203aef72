"""What of a frozen model gets trained factors, and how the base is held."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

BaseFormat = Literal["int8", "nf4"]
"""How the weights of a frozen base may be stored: see `_blockwise_quantization`."""


@dataclasses.dataclass(frozen=True)
class LoRATarget:
    """Weights that get factors, and which of their dims are inputs.

    Args:
      pattern: Path pattern, one `*` a path component.
      num_in: How many of the weight's dims, in its unit, are inputs: 1 of
        `[embed, heads, head_dim]`, 2 of `[heads, head_dim, embed]`. None: 1 of 2.
      out_first: The outputs come first, as in torch's and equinox's `[out, in]`.
      rank: Of these weights; None for `LoRA.rank`.
      alpha: Likewise.
    """

    pattern: str
    num_in: int | None = None
    out_first: bool = False
    rank: int | None = None
    alpha: float | None = None


@dataclasses.dataclass(frozen=True)
class LoRA:
    """A frozen model with trained low-rank factors beside some of its weights.

    A weight `w` computes as `w + scale * a @ b`, `a` of shape `[*in, rank]`, drawn
    uniformly within `1 / sqrt(in)`, and `b` of shape `[rank, *out]`, zero at first.
    Where the model multiplies by it the sum is not made: its input goes through `a` and
    `b` in float32. Elsewhere (a convolution, an embedding, a loop inside the unit) the
    sum is made when the unit is entered, and let go with it.

    Args:
      rank: Columns of `a`.
      targets: Which weights; a lone pattern is a matrix `[in, out]`.
      alpha: `scale` is `alpha / rank`. None: `rank`, so that it is 1.
      use_rslora: `scale` is `alpha / sqrt(rank)` instead.
      dropout: Share of the inputs of `a` that are zero in a training step, the others
        scaled up.
      modules_to_save: Path patterns of weights that are trained as they are.
      base: How the matrices of units are stored, 2 dims and more: "nf4" in 4 bits,
        "int8" in 8, with one float32 scale for each 64 of them. They travel like that,
        and are decoded where their unit is entered. None: as they compute.

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
        """Checks the ranges; all offenders in one message."""
        if isinstance(self.targets, str) or isinstance(self.modules_to_save, str):
            raise ValueError(
                f"LoRA(targets={self.targets!r}, modules_to_save="
                f"{self.modules_to_save!r}): each is a sequence of path patterns."
            )
        object.__setattr__(self, "targets", tuple(self.targets))
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
        if self.base not in (None, "int8", "nf4"):
            wrong.append(f"base={self.base!r}, one of 'int8', 'nf4', None")
        if wrong:
            raise ValueError(f"LoRA: {'; '.join(wrong)}.")

    @property
    def all_targets(self) -> tuple[LoRATarget, ...]:
        """The targets, a lone pattern among them as a `LoRATarget`."""
        return tuple(
            LoRATarget(target) if isinstance(target, str) else target
            for target in self.targets
        )

    def rank_of(self, target: LoRATarget) -> int:
        """The rank of a target's factors."""
        return self.rank if target.rank is None else target.rank

    def scale_of(self, target: LoRATarget) -> float:
        """What the product of a target's factors is multiplied by."""
        rank = self.rank_of(target)
        return self._alpha(target) / (math.sqrt(rank) if self.use_rslora else rank)

    def _alpha(self, target: LoRATarget) -> float:
        alpha = self.alpha if target.alpha is None else target.alpha
        return self.rank_of(target) if alpha is None else alpha
