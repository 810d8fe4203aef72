"""Writing one step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fsdp_jax._state import TrainState
from fsdp_jax.checkpoint._agree import check_same, together
from fsdp_jax.checkpoint._engine import (
    StateHandler,
    manager,
    raise_failure,
    remove_unfinished,
    save_arguments,
)
from fsdp_jax.checkpoint._keys import Leaf, flatten, layout
from fsdp_jax.checkpoint._steps import latest_step
from fsdp_jax.checkpoint._stored import is_dtype_stored
from fsdp_jax.checkpoint._typed_json import encode


def save(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Writes `path/<state.step>`, complete or not at all; each device its own shards.

    Every chunk of values gets a checksum, and the step a manifest of its files.

    Args:
      path: The directory of the run; made if missing. What an earlier save left there
        unfinished is removed.
      state: What to save; its own `step` names the folder.
      metadata: What belongs to the step and is no array (where the data iterator
        stands, the model's config): None, bool, int, float, str, bytes, and lists,
        tuples and dicts of them. It comes back as it was.

    Raises:
      ValueError: If the directory holds this step or a later one: a committed step is
        never overwritten, and an older one beside it would never be the `latest`. If
        `metadata` holds anything else, or `state` what cannot be stored.
    """
    step = int(state.step)
    arguments = prepare(path, step, state, metadata)
    handler = StateHandler()
    with manager(path, handler, enable_async_checkpointing=False) as steps:
        # By force: Orbax's own policies would skip a step without a word.
        steps.save(step, args=arguments, force=True)
        raise_failure(handler, Path(path) / str(step))


def prepare(
    path: str | os.PathLike[str],
    step: int,
    state: TrainState,
    metadata: dict[str, Any] | None,
) -> Any:
    """Checks all that can be checked, in every process; what to hand to the manager.

    Raises:
      ValueError: As for `save`, or if the processes do not save the same.
    """
    with together("Saving"):
        remove_unfinished(Path(path))
    with together("Saving"):
        leaves, encoded = flatten(state), encode(metadata or {})
        check_free(path, step)
        _check_storable(leaves)
    check_same("the step that is saved", step)
    check_same("the layout of the state that is saved", layout(leaves))
    check_same("the metadata that is saved", encoded)
    return save_arguments(leaves, encoded)


def check_free(path: str | os.PathLike[str], step: int) -> None:
    """Raises a `ValueError` if `step` cannot become the newest under `path`."""
    newest = latest_step(path)
    if newest is not None and newest >= step:
        raise ValueError(
            f"'{path}' already holds step {newest}, so step {step} cannot be saved "
            "there. Save to another directory, or remove the later steps first."
        )
    if (folder := Path(path) / str(step)).exists():
        raise ValueError(
            f"'{folder}' is in the way of step {step}: it is no complete step, or not "
            "one of fsdp_jax. Look at it, and remove it."
        )


def _check_storable(leaves: dict[str, Leaf]) -> None:
    """Raises a `ValueError` that names every leaf that zarr has no place for."""
    problems = [f"{name}: no elements" for name, x in leaves.items() if 0 in x.shape]
    problems += [
        f"{name}: dtype {leaf.value.dtype}"
        for name, leaf in leaves.items()
        if not is_dtype_stored(leaf.value.dtype.name)
    ]
    if problems:
        raise ValueError(
            f"Cannot save {len(problems)} leaf/leaves:\n  "
            + "\n  ".join(problems)
            + "\nLeave them out of the state, or cast them."
        )
