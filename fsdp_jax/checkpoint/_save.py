"""Saves one step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fsdp_jax.checkpoint._assets import Files, find_files
from fsdp_jax.checkpoint._leaf_names import IMPLS, Leaf, flatten, layout
from fsdp_jax.checkpoint._lease import leased
from fsdp_jax.checkpoint._manifest import Identity, read_manifest
from fsdp_jax.checkpoint._multihost import check_same, exchange, together
from fsdp_jax.checkpoint._objects import Captured, Extra, capture
from fsdp_jax.checkpoint._orbax_handler import (
    UNFINISHED,
    StateHandler,
    manager,
    raise_failure,
    remove_unfinished,
    save_arguments,
)
from fsdp_jax.checkpoint._paths import as_path, failed_writes, is_local, outages
from fsdp_jax.checkpoint._run_id import make_run_id
from fsdp_jax.checkpoint._steps import committed_steps, latest_step, state_directory
from fsdp_jax.checkpoint._typed_json import encode
from fsdp_jax.checkpoint._zarr import is_dtype_stored
from fsdp_jax.training._donation import check_not_donated
from fsdp_jax.training._state import TrainState


def save(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    metadata: dict[str, Any] | None = None,
    extras: Mapping[str, Extra] | None = None,
    files: Mapping[str, Files] | None = None,
) -> None:
    """Saves `path/<state.step>` atomically; each device writes its own shards.

    Every chunk of values gets a checksum, and the step a manifest of its files.

    Args:
      path: Directory of the run; created if missing. Unfinished earlier saves in it are
        removed.
      state: State to save; its `step` names the folder. It includes optax's schedules,
        as the counts that they are functions of.
      metadata: Values other than jax arrays, such as the model's config: None, bool,
        int, float, str, bytes, numpy scalars and arrays, and lists, tuples and dicts of
        them. Restored in the same types.
      extras: Objects whose state to save, such as a data iterator or an average of the
        weights; pass them to `load` under the same names to restore it. See
        `Checkpointable`, and `PerProcess` for objects that differ between processes.
      files: A file, a directory, or several of them, to copy into the step under each
        name, such as a tokenizer's; see `load_files`. Only those of process 0 are used.

    Raises:
      ValueError: If the directory has this step or a later one: a committed step is
        never overwritten, and an older step would never be the newest. If `state` is no
        `TrainState`, or was donated to a step. If another process, or an open
        `Checkpointer`, writes to it. If `metadata` has other types, or `state` or
        `extras` contain values that cannot be stored.
      OSError: If a file cannot be written, such as on a full disk.
      ObjectStoreError: If the path is in an object store, and it does not answer.

    Examples:
      >>> state = fsdp.init_state(plan, tx, params, step=100)
      >>> fsdp.save(path, state, metadata={"hidden_size": 16})
      >>> fsdp.latest_step(path)
      100
      >>> fsdp.checkpoint.load_metadata(path)
      {'hidden_size': 16}
    """
    directory = as_path(path)
    step = savable_step(state)
    checked = check_save(step, state, Beside(metadata, extras, files))
    with leased(path):
        arguments = prepare(path, step, checked)
        handler = StateHandler()
        with manager(path, handler, enable_async_checkpointing=False) as steps:
            # `force`, since Orbax's own policies would skip a step silently.
            folder = directory / str(step)
            with outages(folder), failed_writes(folder):
                steps.save(step, args=arguments, force=True)
                raise_failure(handler, folder)


def savable_step(state: Any) -> int:
    """Returns the step of a state, or raises a `ValueError` if it cannot be saved."""
    if not hasattr(state, "step"):
        raise ValueError(
            f"save: got a {type(state).__name__}, not a TrainState. Save the state of "
            "training, or make one of weights with fsdp_jax.init_state(plan, tx, "
            "params)."
        )
    check_not_donated(state, "state")
    return int(state.step)


@dataclasses.dataclass(frozen=True)
class Beside:
    """Arguments of `save` besides the state."""

    metadata: dict[str, Any] | None = None
    extras: Mapping[str, Extra] | None = None
    files: Mapping[str, Files] | None = None


@dataclasses.dataclass(frozen=True)
class Checked:
    """Contents of a save, checked in every process before anything is written.

    Attributes:
      leaves: Leaves of the state and of the extras, by name.
      encoded: Metadata as JSON.
      contents: Files beside the arrays, by name.
    """

    leaves: dict[str, Leaf]
    encoded: Any
    contents: dict[str, bytes | Path]


def check_save(step: int, state: TrainState, beside: Beside) -> Checked:
    """Checks what is to be saved in every process; writes nothing.

    Raises:
      ValueError: If it cannot be stored, or the processes pass different values.
    """
    with together("Saving"):
        captured, encoded = capture(beside.extras or {}), encode(beside.metadata or {})
        leaves = flatten(state) | captured.leaves
        contents = _contents(leaves, captured, beside)
        _check_storable(leaves)
    check_same("the step that is saved", step)
    check_same("the layout of the state that is saved", layout(leaves))
    check_same("the metadata that is saved", encoded)
    check_same("what extras hold that are not PerProcess", captured.shared)
    return Checked(leaves, encoded, contents)


def prepare(path: str | os.PathLike[str], step: int, checked: Checked) -> Any:
    """Makes room for a step, and returns the arguments for the manager.

    Raises:
      ValueError: If the directory cannot take the step, as for `save`.
    """
    with together("Saving"):
        remove_unfinished(as_path(path))
    with together("Saving"):
        check_free(path, step)
        if jax.process_index() == 0:
            _check_can_be_made(as_path(path), step)
    identity = _identify(path, step)
    return save_arguments(identity, checked.leaves, checked.encoded, checked.contents)


def _identify(path: str | os.PathLike[str], step: int) -> Identity:
    """Returns the identity of a save, the same in all processes."""
    with together("Saving"):
        first = jax.process_index() == 0
        run = make_run_id(path, lambda: newest_run(path)) if first else ""
    run, attempt = exchange([run, secrets.token_hex(8)])[0]
    return Identity(step, run, attempt)


def newest_run(path: str | os.PathLike[str]) -> str | None:
    """Returns the run of the newest step that says it; None if none does."""
    for step in reversed(committed_steps(path)):
        with contextlib.suppress(ValueError):  # Damaged, or of an older format.
            return read_manifest(state_directory(path, step)).identity.run
    return None


def _contents(
    leaves: dict[str, Leaf], captured: Captured, beside: Beside
) -> dict[str, bytes | Path]:
    """Returns the files that this process writes beside the arrays."""
    contents: dict[str, bytes | Path] = {**captured.contents()}
    if jax.process_index() == 0:
        impls = {name: leaf.impl for name, leaf in leaves.items() if leaf.impl}
        contents[IMPLS] = json.dumps(impls).encode()
        contents |= find_files(beside.files or {})
    return contents


def check_free(path: str | os.PathLike[str], step: int) -> None:
    """Raises a `ValueError` if `step` cannot become the newest step under `path`."""
    newest = latest_step(path)
    if newest is not None and newest >= step:
        raise ValueError(
            f"'{path}' already holds step {newest}, so step {step} cannot be saved "
            "there. Save to another directory, or remove the later steps first."
        )
    if (folder := as_path(path) / str(step)).exists():
        raise ValueError(
            f"'{folder}' is in the way of step {step}: it is incomplete, or not "
            "written by fsdp_jax. Look at it, and remove it."
        )


def _check_can_be_made(path: Path, step: int) -> None:
    """Makes the folder of a save, and removes it for Orbax to make it again.

    If Orbax cannot, all processes wait for it until their timeouts.

    Raises:
      OSError: If the folder cannot be made.
    """
    if not is_local(path):
        return  # There are no folders to make.
    folder = path / f"{step}{UNFINISHED}"
    # Writers of a save that failed may still run, and make it too.
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _check_storable(leaves: dict[str, Leaf]) -> None:
    """Raises a `ValueError` that lists all leaves that zarr cannot store."""
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
            + "\nLeave them out of the model; an array of another dtype may be cast."
        )
