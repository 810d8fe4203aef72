"""Options that decide the numbers of a training run, on any mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import optax

import bridge
from bridge.models import DecoderConfig
from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._decoder_loss import LossConfig
from fsdp_jax.cli._lora import Adapter, AdapterConfig
from fsdp_jax.cli._optimizer import OptimizerConfig
from fsdp_jax.cli._precision import Precision
from fsdp_jax.cli._routing import Routing


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Options that a checkpoint remembers, so that a resumed run repeats none.

    The names of all fields of all parts differ, so that an option names one of them.

    Attributes:
      data: Batches.
      microbatches: Microbatches a step.
      optimizer: Optimizer.
      loss: Terms of the loss beside the cross entropy.
      precision: Dtypes and formats.
      routing: Routing of models with experts.
      lora: Factors that are trained in place of the model.

    Raises:
      ValueError: If a number is out of its range; all offenders in one message.
    """

    data: DataConfig
    microbatches: int = 1
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    precision: Precision = Precision()
    routing: Routing = Routing()
    lora: AdapterConfig = AdapterConfig()

    def __post_init__(self):
        """Checks the ranges."""
        wrong = [problem for part in _parts(self) for problem in part.problems()]
        if self.microbatches < 1:
            wrong.append(f"--microbatches {self.microbatches} must be at least 1")
        if self.optimizer.optimizer == "muon" and self.lora.lora_rank:
            wrong.append("--optimizer muon is for whole matrices, not for --lora-rank")
        if self.optimizer.ema and self.lora.lora_rank:
            wrong.append("--ema averages the weights of a model, not of --lora-rank")
        if (rate := self.routing.expert_bias_rate) and self.lora.lora_rank:
            wrong.append(
                f"--expert-bias-rate {rate} moves biases of a model, which "
                "--lora-rank keeps"
            )
        wrong += _problems_of_objective(self)
        if wrong:
            raise ValueError("; ".join(wrong) + ".")

    @property
    def adapter(self) -> Adapter | None:
        """LoRA that is trained; None if the model is."""
        return self.lora.make(self.precision.param_dtype)

    def make_optimizer(self, model: DecoderConfig) -> optax.GradientTransformation:
        """Makes the optimizer.

        Args:
          model: Config of the model, whose matrices Muon updates.

        Raises:
          ValueError: If Muon has no matrices.
        """
        is_muon = self.optimizer.optimizer == "muon"
        matrices = bridge.lora_targets(model, ["all-linear"]) if is_muon else {}
        return self.optimizer.make(matrices)

    def values(self) -> dict[str, Any]:
        """Returns the value of each option, by its name."""
        parts = {name: x for part in _parts(self) for name, x in vars(part).items()}
        return {**parts, "microbatches": self.microbatches}


def _problems_of_objective(config: TrainConfig) -> list[str]:
    """Returns the terms of the loss that the objective does not have."""
    loss, wrong = config.loss, []
    if config.data.objective == "reward":
        return _problems_of_reward(config)
    if config.data.objective != "dpo":
        if loss.dpo_beta is not None:
            wrong.append(f"--dpo-beta {loss.dpo_beta}: give --objective dpo too")
        return wrong
    if loss.label_smoothing >= 0.5:
        wrong.append(
            f"--label-smoothing {loss.label_smoothing}: less than 0.5 with "
            "--objective dpo"
        )
    if loss.z_loss:
        wrong.append(f"--z-loss {loss.z_loss}: --objective dpo has no such term")
    return wrong


def _problems_of_reward(config: TrainConfig) -> list[str]:
    """Returns the options that a reward model does not have."""
    given = {
        "--dpo-beta": config.loss.dpo_beta,
        "--label-smoothing": config.loss.label_smoothing,
        "--z-loss": config.loss.z_loss,
        "--expert-bias-rate": config.routing.expert_bias_rate,
        "--lora-rank": config.lora.lora_rank,
        "--ema": config.optimizer.ema,
    }
    return [
        f"{name} {value}: --objective reward has no such option"
        for name, value in given.items()
        if value
    ]


def _parts(config: TrainConfig) -> list[Any]:
    return [x for x in vars(config).values() if dataclasses.is_dataclass(x)]


_PARTS = {
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "loss": LossConfig,
    "precision": Precision,
    "routing": Routing,
    "lora": AdapterConfig,
}


def config_of(values: Mapping[str, Any]) -> TrainConfig:
    """Returns the config of options.

    Args:
      values: Value of each option, by its name; those left out have their defaults.

    Raises:
      ValueError: If a number is out of its range.
    """
    parts: dict[str, Any] = {}
    for part, kind in _PARTS.items():
        given = {name: values[name] for name in _names(kind) if name in values}
        parts[part] = kind(**given)
    if "microbatches" in values:
        parts["microbatches"] = values["microbatches"]
    return TrainConfig(**parts)


def option_values(*groups: Any) -> dict[str, Any]:
    """Returns the options of a `TrainConfig` that were given.

    Args:
      *groups: Groups of options; None where an option was not given.
    """
    given = {name: value for group in groups for name, value in vars(group).items()}
    known = {
        field.name for kind in _PARTS.values() for field in dataclasses.fields(kind)
    }
    return {
        name: value
        for name, value in given.items()
        if value is not None and name in {*known, "microbatches"}
    }


def merge_options(
    given: Mapping[str, Any], stored: Mapping[str, Any], defaults: Mapping[str, Any]
) -> TrainConfig:
    """Merges given options, those that a checkpoint remembers, and defaults.

    Args:
      given: Options from the command line, by name.
      stored: Config of the checkpoint that is resumed, as `dataclasses.asdict` made it;
        empty for a new run.
      defaults: Defaults of the model, by name.

    Raises:
      ValueError: If a given value would change the rows of a resumed run, what it
        trains or the form of its state, or is out of its range.
    """
    if not stored:
        return config_of({**defaults, **given})
    saved = stored_config(stored)
    values = saved.values()
    same = [name for name in _names(DataConfig) if name != "batch"]
    if changed := _changed(same, given, values):
        raise ValueError(
            f"A resumed run continues with the same rows, which {', '.join(changed)} "
            "would change. Leave the option out, or start anew: export the checkpoint "
            "and train with --hf."
        )
    if changed := _changed(_names(AdapterConfig), given, values):
        raise ValueError(
            f"A resumed run trains the same parameters: {', '.join(changed)}. Leave "
            "the option out, or start anew: export the checkpoint and train with --hf."
        )
    config = config_of({**values, **given})
    _check_same_state(config, saved)
    return config


def stored_config(stored: Mapping[str, Any]) -> TrainConfig:
    """Returns the config of a checkpoint.

    Args:
      stored: What `dataclasses.asdict` made of it.
    """
    values = dict(stored)
    parts = {name: kind(**values.pop(name)) for name, kind in _PARTS.items()}
    return TrainConfig(**parts, **values)


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _changed(
    names: Sequence[str], given: Mapping[str, Any], stored: Mapping[str, Any]
) -> list[str]:
    return [
        f"--{name.replace('_', '-')} {given[name]} (saved with {stored[name]})"
        for name in names
        if name in given and given[name] != stored[name]
    ]


def _check_same_state(config: TrainConfig, saved: TrainConfig) -> None:
    """Raises a `ValueError` unless the optimizer's state has the form it had."""
    of_the_state = ("optimizer", "optimizer_bits")
    changed = _changed(of_the_state, vars(config.optimizer), vars(saved.optimizer))
    if bool(config.optimizer.ema) != bool(saved.optimizer.ema):
        changed.append(
            f"--ema {config.optimizer.ema} (saved with {saved.optimizer.ema})"
        )
    now, then = config.precision, saved.precision
    if (now.scale() is None) != (then.scale() is None):
        changed.append(
            f"--param-dtype {now.param_dtype} (saved with {then.param_dtype}, and "
            "float16 alone has a loss scale)"
        )
    if changed:
        raise ValueError(
            f"A resumed run keeps the layout of its state: {'; '.join(changed)}. Leave "
            "the option out, or start anew: export the checkpoint and train with --hf."
        )


def is_reward_model(metadata: Mapping[str, Any]) -> bool:
    """Returns whether a step is one of `--objective reward`.

    Args:
      metadata: Metadata of the step.
    """
    return (
        "train" in metadata
        and stored_config(metadata["train"]).data.objective == "reward"
    )


def adapter_of(metadata: Mapping[str, Any]) -> Adapter | None:
    """Returns the LoRA of a step; None if it has none.

    Args:
      metadata: Metadata of the step.
    """
    return stored_config(metadata["train"]).adapter if "train" in metadata else None
