"""The average of the weights in the place of the newest ones."""

from __future__ import annotations

import dataclasses

from fsdp_jax.cli._model_source import Checkpoint, Origin


def averaged(origin: Origin) -> Checkpoint:
    """Returns a checkpoint whose weights are the average that `--ema` made.

    Args:
      origin: Model.

    Raises:
      ValueError: If it has no average.
    """
    if not isinstance(origin, Checkpoint):
        raise ValueError("--ema: the model is not a checkpoint of `fsdp-jax train`.")
    if not origin.metadata.get("train", {}).get("optimizer", {}).get("ema"):
        raise ValueError(
            f"--ema: step {origin.step} of '{origin.path}' was not trained with --ema, "
            "so that it has no average. Leave the option out."
        )
    return dataclasses.replace(origin, averaged=True)
