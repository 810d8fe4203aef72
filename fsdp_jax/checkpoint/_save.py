"""Writing one step."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fsdp_jax._local_path import check_local
from fsdp_jax.checkpoint._assets import Files, find_files
from fsdp_jax.checkpoint._leaf_names import IMPLS, Leaf, flatten, layout
from fsdp_jax.checkpoint._multihost import check_same, together
from fsdp_jax.checkpoint._objects import Captured, Extra, capture
from fsdp_jax.checkpoint._orbax_handler import (
    StateHandler,
    manager,
    raise_failure,
    remove_unfinished,
    save_arguments,
)
from fsdp_jax.checkpoint._steps import latest_step
from fsdp_jax.checkpoint._typed_json import encode
from fsdp_jax.checkpoint._zarr import is_dtype_stored
from fsdp_jax.training._state import TrainState


def save(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    metadata: dict[str, Any] | None = None,
    extras: Mapping[str, Extra] | None = None,
    files: Mapping[str, Files] | None = None,
) -> None:
    """Writes `path/<state.step>`, complete or not at all; each device its own shards.

    Every chunk of values gets a checksum, and the step a manifest of its files.

    Args:
      path: The directory of the run; made if missing. What an earlier save left there
        unfinished is removed.
      state: What to save; its own `step` names the folder. A schedule of optax's is in
        it, as the count that it is a function of.
      metadata: What belongs to the step and is no array (the model's config): None,
        bool, int, float, str, bytes, numbers and arrays of numpy, and lists, tuples
        and dicts of them. It comes back as it was.
      extras: Objects that go on where they stood when they are given to `load` by the
        same names: a data iterator, an average of the weights. See `Checkpointable`,
        and `PerProcess` for those of which each process has its own.
      files: A file, a directory, or several of them, that the step carries along under
        each name, such as a tokenizer's; see `load_files`. Those of the first process
        count.

    Raises:
      ValueError: If the directory holds this step or a later one: a committed step is
        never overwritten, and an older one beside it would never be the `latest`. If
        `metadata` holds anything else, or `state` or `extras` what cannot be stored.
    """
    check_local(path)
    step = int(state.step)
    arguments = prepare(path, step, state, Beside(metadata, extras, files))
    handler = StateHandler()
    with manager(path, handler, enable_async_checkpointing=False) as steps:
        # By force: Orbax's own policies would skip a step without a word.
        steps.save(step, args=arguments, force=True)
        raise_failure(handler, Path(path) / str(step))


@dataclasses.dataclass(frozen=True)
class Beside:
    """What is saved beside a state: the arguments of `save` of these names."""

    metadata: dict[str, Any] | None = None
    extras: Mapping[str, Extra] | None = None
    files: Mapping[str, Files] | None = None


def prepare(
    path: str | os.PathLike[str], step: int, state: TrainState, beside: Beside
) -> Any:
    """Checks all that can be checked, in every process; what to hand to the manager.

    Raises:
      ValueError: As for `save`, or if the processes do not save the same.
    """
    with together("Saving"):
        remove_unfinished(Path(path))
    with together("Saving"):
        captured, encoded = capture(beside.extras or {}), encode(beside.metadata or {})
        leaves = flatten(state) | captured.leaves
        contents = _contents(leaves, captured, beside)
        check_free(path, step)
        _check_storable(leaves)
    check_same("the step that is saved", step)
    check_same("the layout of the state that is saved", layout(leaves))
    check_same("the metadata that is saved", encoded)
    check_same("what extras hold that are not PerProcess", captured.shared)
    return save_arguments(leaves, encoded, contents)


def _contents(
    leaves: dict[str, Leaf], captured: Captured, beside: Beside
) -> dict[str, bytes | Path]:
    """What this process writes beside the arrays."""
    contents: dict[str, bytes | Path] = {**captured.contents()}
    if jax.process_index() == 0:
        impls = {name: leaf.impl for name, leaf in leaves.items() if leaf.impl}
        contents[IMPLS] = json.dumps(impls).encode()
        contents |= find_files(beside.files or {})
    return contents


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
