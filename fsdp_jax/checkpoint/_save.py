"""Writing one step."""

from __future__ import annotations

import os
from typing import Any

import orbax.checkpoint as ocp

from fsdp_jax._state import TrainState
from fsdp_jax.checkpoint._keys import flatten
from fsdp_jax.checkpoint._steps import manager


def save(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Writes `path/<state.step>`, complete or not at all; each device its own shards.

    Args:
      path: The directory of the run; made if missing.
      state: What to save; its own `step` names the folder.
      metadata: What belongs to the step and is no array (where the data iterator
        stands, the model's config), as JSON.

    Raises:
      ValueError: If the directory holds this step or a later one: a committed step is
        never overwritten, and an older one beside it would never be the `latest`.
    """
    step = int(state.step)
    leaves = flatten(state)
    with manager(path, create=True) as steps:
        newest = steps.latest_step()
        if newest is not None and newest >= step:
            raise ValueError(
                f"'{path}' already holds step {newest}, so step {step} cannot be saved "
                "there. Save to another directory, or remove the later steps first."
            )
        steps.save(
            step,
            args=ocp.args.Composite(state=ocp.args.PyTreeSave(leaves)),
            custom_metadata=metadata or {},
            force=True,  # Orbax's own policies would skip a step without a word.
        )
