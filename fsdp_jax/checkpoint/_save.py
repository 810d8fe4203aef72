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
      ValueError: If the step is already there: a committed step is never overwritten.
    """
    step = int(state.step)
    leaves = flatten(state)
    with manager(path, create=True) as steps:
        if step in steps.all_steps():
            raise ValueError(
                f"'{path}' already holds step {step}. Save to another directory, or "
                "remove that step first."
            )
        steps.save(
            step,
            args=ocp.args.Composite(state=ocp.args.PyTreeSave(leaves)),
            custom_metadata=metadata or {},
        )
