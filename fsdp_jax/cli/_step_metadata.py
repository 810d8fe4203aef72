"""Metadata of the steps that `fsdp-jax train` saves."""

from __future__ import annotations

import dataclasses
from typing import Any

import bridge
from fsdp_jax.cli._model_source import Checkpoint, Origin, name_for_adapters
from fsdp_jax.cli._train_config import TrainConfig
from fsdp_jax.cli._training_data import TrainingData, fingerprint_of

BASE_MODEL = "base_model"
"""Metadata of the model whose weights the run began with; None for no such model."""


def make_metadata(
    origin: Origin,
    config: TrainConfig,
    data: TrainingData,
    resumed: Checkpoint | None,
    hf: str | None,
) -> dict[str, Any]:
    """Makes the metadata of every step; checks that a resumed run has the same data.

    Args:
      origin: Model.
      config: Options that decide the numbers.
      data: Data from `read_data`.
      resumed: Step that the run goes on from; None for a new one.
      hf: Directory or hub id that a new run starts from; None for none.

    Raises:
      ValueError: If the data has other tokens than those of the resumed step.
    """
    sha256 = fingerprint_of(data)
    if resumed is not None and resumed.metadata.get("data_sha256", sha256) != sha256:
        raise ValueError(
            f"--data gives other tokens than those that step {resumed.step} of "
            f"'{resumed.path}' was trained on. Give the same files in the same order, "
            "with the same tokenizer, template and eos_token."
        )
    base = name_for_adapters(origin, hf)
    if resumed is not None:
        base = resumed.metadata.get(BASE_MODEL)
    return {
        BASE_MODEL: base,
        "config": bridge.to_hf_config(origin.config),
        "train": dataclasses.asdict(config),
        "data_sha256": sha256,
    }
