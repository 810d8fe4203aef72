"""Options that decide the numbers of a training run, on any mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from fsdp_jax.cli._lora import Adapter, BaseDType
from fsdp_jax.cli._optimizer import (
    NO_DECAY,
    OptimizerBits,
    OptimizerConfig,
    OptimizerName,
    ScheduleShape,
    options_of,
)
from fsdp_jax.cli._precision import ParamGather, Precision
from fsdp_jax.cli._routing import Over, RouterDtype, Routing

Tokenizer = Literal["bytes", "model"]
RowsOf = Literal["pack", "pad"]
Overlong = Literal["truncate", "drop"]
TrainOn = Literal["completions", "all"]
ParamDtype = Literal["float32", "bfloat16", "float16"]

_RATES = ("z_loss", "aux_loss_coef", "router_z_loss_coef", "expert_bias_rate")
_OF_THE_DOCUMENTS = ("rows", "overlong", "train_on", "data_weights")
_OF_THE_DATA = ("batch", "seq", "seed", "tokenizer", *_OF_THE_DOCUMENTS)
_OF_THE_ADAPTER = ("lora_rank", "lora_alpha", "lora_targets", "base_dtype")
_FIRST_SCALE = 2.0**16


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Options that a checkpoint remembers, so that a resumed run repeats none.

    Attributes:
      tokenizer: Tokenizer of the data.
      batch: Rows of a global batch.
      seq: Tokens that a row predicts; it holds one more.
      seed: Seed of the order of the data, and of random weights.
      microbatches: Microbatches a step.
      rows: Layout of documents in rows.
      overlong: Treatment of documents that are longer than a row.
      train_on: Tokens of documents that are trained.
      data_weights: Share of each file among the rows.
      optimizer: Optimizer; its fields up to `optimizer_bits` are those of
        `OptimizerConfig`.
      lr: Learning rate at its peak.
      lr_schedule: Shape of the learning rate after the warmup.
      warmup: Steps in which the learning rate rises from 0.
      lr_steps: Last step of the schedule.
      lr_end: Last learning rate, as a fraction of `lr`.
      lr_decay: Fraction of `lr_steps` in which wsd decays.
      weight_decay: Decoupled weight decay.
      no_decay: Patterns of parameters without weight decay.
      b1: Decay of the first moments.
      b2: Decay of the second moments.
      eps: Constant added to the root of the second moments.
      clip: Norm to which gradients are clipped.
      optimizer_bits: Bits of an element of the moments.
      label_smoothing: Fraction of each target spread over the vocabulary.
      z_loss: Weight of the squared log-normalizer of the logits.
      param_dtype: Dtype that weights are gathered and computed in.
      param_gather: Format in which the matrices of layers are communicated.
      loss_scale: Initial factor of the loss; None for 65536 in float16, else none.
      aux_loss_coef: Weight of the load-balancing loss; this field and those up to
        `router_dtype` are those of `Routing`.
      aux_loss_over: Tokens whose routing is balanced.
      router_z_loss_coef: Weight of the routers' z-loss.
      expert_bias_rate: Change of the routers' biases in a step.
      capacity_factor: Capacity of an expert; None for no limit.
      router_dtype: Dtype of the routers' products.
      lora_rank: Rank of the factors that are trained in place of the model; 0 for none.
      lora_alpha: Numerator of their scale, `lora_alpha / lora_rank`; None for the rank.
      lora_targets: PEFT's names of the modules with factors, separated by commas.
      base_dtype: Format of the frozen weights; None for `param_dtype`.

    Raises:
      ValueError: If a number is out of its range; all offenders in one message.
    """

    tokenizer: Tokenizer
    batch: int = 8
    seq: int = 256
    seed: int = 0
    microbatches: int = 1
    rows: RowsOf = "pack"
    overlong: Overlong = "truncate"
    train_on: TrainOn = "completions"
    data_weights: str = ""
    optimizer: OptimizerName = "adamw"
    lr: float = 3e-4
    lr_schedule: ScheduleShape = "constant"
    warmup: int = 0
    lr_steps: int | None = None
    lr_end: float = 0.0
    lr_decay: float = 0.1
    weight_decay: float = 0.1
    no_decay: str = NO_DECAY
    b1: float = 0.9
    b2: float | None = None
    eps: float = 1e-8
    clip: float = 0.0
    optimizer_bits: OptimizerBits = 32
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    param_dtype: ParamDtype = "float32"
    param_gather: ParamGather = "param_dtype"
    loss_scale: float | None = None
    aux_loss_coef: float = 0.0
    aux_loss_over: Over = "batch"
    router_z_loss_coef: float = 0.0
    expert_bias_rate: float = 0.0
    capacity_factor: float | None = None
    router_dtype: RouterDtype = "float32"

    @property
    def precision(self) -> Precision:
        """Communication and loss scale."""
        default = _FIRST_SCALE if self.param_dtype == "float16" else None
        scale = self.loss_scale or default
        return Precision(self.param_gather, scale)

    @property
    def optimizer_config(self) -> OptimizerConfig:
        """Optimizer."""
        return options_of(self)

    @property
    def routing(self) -> Routing:
        """Routing of models with experts."""
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
        wrong += self.optimizer_config.problems()
        if not 0 <= self.label_smoothing < 1:
            wrong.append(
                f"--label-smoothing {self.label_smoothing}: at least 0, less than 1"
            )
        if self.optimizer == "muon" and self.lora_rank:
            wrong.append("--optimizer muon is for whole matrices, not for --lora-rank")
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
        """LoRA that is trained; None if the model is."""
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


def refuse_document_options(given: dict[str, Any]) -> None:
    """Raises a `ValueError` for options of documents, which text files do not have.

    Args:
      given: Fields of `Recipe` from the command line.
    """
    wrong = [
        f"--{name.replace('_', '-')} {given[name]}"
        for name in _OF_THE_DOCUMENTS
        if name in given
    ]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: for --data of JSON Lines (.jsonl), not for text."
        )


def make_recipe(
    given: dict[str, Any], stored: dict[str, Any], defaults: dict[str, Any]
) -> Recipe:
    """Merges given options, those that a checkpoint remembers, and defaults.

    Args:
      given: Fields of `Recipe` from the command line; None where not given.
      stored: Fields of the checkpoint that is resumed; empty for a new run.
      defaults: Defaults of the model.

    Raises:
      ValueError: If a typed value would change the batches of a resumed run, or
        is out of its range.
    """
    typed = {name: value for name, value in given.items() if value is not None}
    changed = [
        f"--{name.replace('_', '-')} {typed[name]} (saved with {stored[name]})"
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
    changed = [
        f"--{name.replace('_', '-')} {getattr(recipe, name)} (saved with "
        f"{getattr(saved, name)})"
        for name in ("optimizer", "optimizer_bits")
        if getattr(recipe, name) != getattr(saved, name)
    ]
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
    """Returns the LoRA of a step; None if it has none.

    Args:
      metadata: Metadata of the step.
    """
    return Recipe(**metadata["recipe"]).adapter if "recipe" in metadata else None
