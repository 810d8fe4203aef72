"""What decides the numbers of a training run, whatever the mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from fsdp_jax.cli._adam import AdamOptions
from fsdp_jax.cli._lora import Adapter, BaseDType
from fsdp_jax.cli._precision import OptimizerBits, ParamGather, Precision
from fsdp_jax.cli._routing import Over, RouterDtype, Routing

Tokenizer = Literal["bytes", "model"]
ParamDtype = Literal["float32", "bfloat16", "float16"]

_RATES = (
    *("lr", "weight_decay", "eps", "clip_grad"),
    *("aux_loss_coef", "router_z_loss_coef", "expert_bias_rate"),
)
_OF_THE_DATA = ("batch", "seq", "seed", "tokenizer")
_OF_THE_ADAPTER = ("lora_rank", "lora_alpha", "lora_targets", "base_dtype")
_FIRST_SCALE = 2.0**16


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The choices that a checkpoint remembers, so that a resumed run repeats none.

    Attributes:
      batch: Rows of a global batch.
      seq: Tokens that a row predicts; it holds one more.
      seed: Of the order of the data.
      tokenizer: How text becomes tokens.
      lr: AdamW's learning rate.
      weight_decay: AdamW's weight decay.
      b1: See `AdamOptions`, as the next four.
      b2: Decay of AdamW's second moments.
      eps: What AdamW adds to their root.
      clip_grad: Norm to which gradients are clipped.
      no_decay: Leaves that are not decayed.
      microbatches: Microbatches a step.
      param_dtype: What weights are gathered and computed in.
      param_gather: What a layer's matrices travel in instead, to be decoded there.
      loss_scale: The first factor of the loss; None for 65536 in float16, else none.
      optimizer_bits: Of an element of AdamW's moments.
      aux_loss_coef: See `Routing`, as all below.
      aux_loss_over: Whose use of experts that loss balances.
      router_z_loss_coef: Weight of the routers' z-loss.
      expert_bias_rate: How far routers' biases move in a step.
      capacity_factor: What experts have room for; None for all that come.
      router_dtype: In which routers multiply.
      lora_rank: Of the factors that are trained in the place of the model; 0 for none.
      lora_alpha: `lora_alpha / lora_rank` scales their product; None for 1.
      lora_targets: PEFT's names of the modules that have them, by commas.
      base_dtype: How the frozen model is kept; None for `param_dtype`.

    Raises:
      ValueError: If a number is out of its range; all offenders in one message.
    """

    tokenizer: Tokenizer
    batch: int = 8
    seq: int = 256
    seed: int = 0
    lr: float = 3e-4
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 0.0
    no_decay: str = ""
    microbatches: int = 1
    param_dtype: ParamDtype = "float32"
    param_gather: ParamGather = "param_dtype"
    loss_scale: float | None = None
    optimizer_bits: OptimizerBits = 32
    aux_loss_coef: float = 0.0
    aux_loss_over: Over = "batch"
    router_z_loss_coef: float = 0.0
    expert_bias_rate: float = 0.0
    capacity_factor: float | None = None
    router_dtype: RouterDtype = "float32"

    @property
    def precision(self) -> Precision:
        """How numbers travel and rest."""
        default = _FIRST_SCALE if self.param_dtype == "float16" else None
        scale = self.loss_scale or default
        return Precision(self.param_gather, scale, self.optimizer_bits)

    @property
    def adam(self) -> AdamOptions:
        """AdamW's settings beside its rate and its decay."""
        fields = (field.name for field in dataclasses.fields(AdamOptions))
        return AdamOptions(**{name: getattr(self, name) for name in fields})

    @property
    def routing(self) -> Routing:
        """How tokens find experts, and these are kept balanced."""
        fields = (field.name for field in dataclasses.fields(Routing))
        return Routing(**{name: getattr(self, name) for name in fields})

    lora_rank: int = 0
    lora_alpha: float | None = None
    lora_targets: str = "all-linear"
    base_dtype: BaseDType | None = None

    def __post_init__(self):
        """Checks the ranges."""
        wrong = [
            f"--{name} {getattr(self, name)}: at least 1"
            for name in ("batch", "seq", "microbatches")
            if getattr(self, name) < 1
        ]
        wrong += [
            f"--{name.replace('_', '-')} {value}: a finite number, at least 0"
            for name in _RATES
            if not 0 <= (value := getattr(self, name)) < math.inf
        ]
        wrong += [
            f"--{name} {value}: at least 0, less than 1"
            for name in ("b1", "b2")
            if not 0 <= (value := getattr(self, name)) < 1
        ]
        if not 0 <= self.seed < 2**32:
            wrong.append(f"--seed {self.seed}: at least 0, below 2**32")
        if self.capacity_factor is not None and not (
            0 < self.capacity_factor < math.inf
        ):
            wrong.append(f"--capacity-factor {self.capacity_factor}: more than 0")
        if self.loss_scale is not None and not 1 <= self.loss_scale < math.inf:
            wrong.append(f"--loss-scale {self.loss_scale}: a finite number, at least 1")
        if self.loss_scale is not None and self.param_dtype != "float16":
            wrong.append(
                f"--loss-scale {self.loss_scale} is for --param-dtype float16, and "
                f"this is {self.param_dtype}"
            )
        wrong += self._wrong_adapter()
        if wrong:
            raise ValueError("; ".join(wrong) + ".")

    @property
    def adapter(self) -> Adapter | None:
        """The LoRA that is trained; None if the model is."""
        if not self.lora_rank:
            return None
        return Adapter(
            self.lora_rank,
            self.lora_alpha or self.lora_rank,
            tuple(self.lora_targets.split(",")),
            self.base_dtype or self.param_dtype,
        )

    def _wrong_adapter(self) -> list[str]:
        if not self.lora_rank:
            alone = {
                "--lora-alpha": self.lora_alpha,
                "--lora-targets": self.lora_targets != "all-linear",
                "--base-dtype": self.base_dtype,
            }
            return [f"{name} needs --lora-rank" for name, x in alone.items() if x]
        wrong = []
        if self.lora_rank < 0:
            wrong.append(f"--lora-rank {self.lora_rank}: at least 1")
        if self.lora_alpha is not None and not 0 < self.lora_alpha < math.inf:
            wrong.append(f"--lora-alpha {self.lora_alpha}: a finite number above 0")
        return wrong


def make_recipe(
    given: dict[str, Any], stored: dict[str, Any], defaults: dict[str, Any]
) -> Recipe:
    """Puts together what was typed, what the checkpoint remembers, and the defaults.

    Args:
      given: Fields of `Recipe` from the command line; None where not typed.
      stored: Those of the checkpoint that is resumed; empty if none is.
      defaults: The model's, for a new run that does not say.

    Raises:
      ValueError: If a typed value would change which batches a resumed run sees, or
        is out of its range.
    """
    typed = {name: value for name, value in given.items() if value is not None}
    changed = [
        f"--{name} {typed[name]} (saved with {stored[name]})"
        for name in _OF_THE_DATA
        if name in typed and name in stored and typed[name] != stored[name]
    ]
    if changed:
        raise ValueError(
            f"A resumed run goes on with the same batches, which {', '.join(changed)} "
            "would change. Leave the option out, or start anew: export the checkpoint "
            "and train with --hf."
        )
    adapter = [
        f"--{name.replace('_', '-')} {typed[name]} (saved with {stored.get(name)})"
        for name in _OF_THE_ADAPTER
        if stored and name in typed and typed[name] != stored.get(name)
    ]
    if adapter:
        raise ValueError(
            f"A resumed run trains what it trained: {', '.join(adapter)}. Leave the "
            "option out, or start anew: export the checkpoint and train with --hf."
        )
    recipe = Recipe(**{**defaults, **stored, **typed})
    if stored:
        _check_same_state(recipe, Recipe(**{**defaults, **stored}))
    return recipe


def _check_same_state(recipe: Recipe, saved: Recipe) -> None:
    """Raises a `ValueError` unless the optimizer's state has the form it had."""
    now, then = recipe.precision, saved.precision
    changed = []
    if now.optimizer_bits != then.optimizer_bits:
        changed.append(
            f"--optimizer-bits {now.optimizer_bits} (saved with {then.optimizer_bits})"
        )
    if (now.loss_scale is None) != (then.loss_scale is None):
        changed.append(
            f"--param-dtype {recipe.param_dtype} (saved with {saved.param_dtype}, and "
            "float16 alone has a loss scale)"
        )
    if changed:
        raise ValueError(
            f"A resumed run goes on with the state it had: {'; '.join(changed)}. Leave "
            "the option out, or start anew: export the checkpoint and train with --hf."
        )


def adapter_of(metadata: dict[str, Any]) -> Adapter | None:
    """The LoRA that a step of a checkpoint holds beside its model; None if none."""
    return Recipe(**metadata["recipe"]).adapter if "recipe" in metadata else None
