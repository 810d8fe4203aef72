"""Removes parts of a committed step, such as the optimizer state."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import jax

from fsdp_jax._tree import matches, unmatched
from fsdp_jax.checkpoint import _assets, _objects
from fsdp_jax.checkpoint._lease import leased
from fsdp_jax.checkpoint._manifest import (
    ITEM,
    Manifest,
    check_seals,
    holds_arrays,
    read_manifest,
    write_manifest,
)
from fsdp_jax.checkpoint._multihost import together
from fsdp_jax.checkpoint._orbax_handler import UNFINISHED, remove_unfinished
from fsdp_jax.checkpoint._paths import as_path, is_local
from fsdp_jax.checkpoint._replace import replace_step, step_folder
from fsdp_jax.checkpoint._seal import seal_files
from fsdp_jax.checkpoint._steps import Step, check_complete, open_step, resolve_step
from fsdp_jax.checkpoint._zarr import copy_arrays

# Orbax's files with the tree and the sharding of each array.
_METADATA, _SHARDING = "_METADATA", "_sharding"


def remove(path: str | os.PathLike[str], step: Step, *parts: str) -> list[str]:
    """Removes parts of a step, and frees their disk space.

    For archiving or serving a step: Adam's moments are twice as large as the
    parameters. The remaining parts are copied as stored, so that they take their disk
    space twice meanwhile, and a few chunks of memory, at most half a GB for any size of
    step. They are verified before the step is replaced. After a crash the step is
    complete, with or without the parts. A directory to which a run is saving is
    refused.

    Args:
      path: Directory that `save` wrote to.
      step: Step to change; None for the newest.
      parts: Patterns of leaves, extras and files, such as `"opt_state"`,
        `"extras.data"` and `"files.tokenizer"`.

    Returns:
      Names of the removed leaves, extras and files.

    Raises:
      ValueError: If there is no such step, a pattern matches nothing, or nothing would
        be left.
      DamagedCheckpointError: If the remaining parts are not as they were written.

    Source: Megatron-LM dist_checkpointing/serialization.py::remove_sharded_tensors
    """
    root = as_path(path).absolute()
    if not is_local(root):
        raise ValueError(
            f"'{path}' is in an object store, where a step cannot be replaced at once. "
            "Copy the step to a disk, remove parts of it there, and copy it to another "
            "directory of the store."
        )
    with together("Removing"):
        number = resolve_step(root, step)
        directory, manifest = open_step(root, number)
        check_seals(directory, manifest, jax.process_index(), jax.process_count())
        gone = _chosen(f"{root}/{number}", manifest, parts)
    with leased(root), together("Removing"):
        if jax.process_index() == 0:
            _write_without(root, number, manifest, set(gone))
    return gone


def _chosen(where: str, manifest: Manifest, parts: Iterable[str]) -> list[str]:
    """Returns the names that the patterns match."""
    names = [*manifest.leaves, *names_beside(manifest)]
    chosen = {name: _matches_one(parts, name) for name in names}
    problems = [f"nothing is called {part!r}" for part in unmatched(parts, names)]
    if not parts:
        problems = ["0 parts are named"]
    elif all(chosen[name] for name in manifest.leaves):
        problems.append("0 leaves would be left")
    if problems:
        raise ValueError(f"Cannot remove from '{where}': {'; '.join(problems)}.")
    return [name for name in names if chosen[name]]


def _matches_one(parts: Iterable[str], name: str) -> bool:
    return any(matches(part, name) is not None for part in parts)


def names_beside(manifest: Manifest) -> list[str]:
    """Returns the names of a step's extras and files, as patterns match them."""
    names = [_name_of_file(file) for file in manifest.files]
    return list(dict.fromkeys(name for name in names if name is not None))


def _name_of_file(file: str) -> str | None:
    kind, *rest = file.split("/")
    return f"{kind}.{rest[0]}" if kind in (_objects.FOLDER, _assets.FOLDER) else None


def _write_without(root: Path, step: int, manifest: Manifest, gone: set[str]) -> None:
    remove_unfinished(root)
    old, new = step_folder(root, step), root / f"{step}{UNFINISHED}"
    leaves = {name: leaf for name, leaf in manifest.leaves.items() if name not in gone}
    shutil.copytree(old, new, ignore=shutil.ignore_patterns(ITEM))
    copy_arrays(old / ITEM, new / ITEM, leaves)
    for file in manifest.files:
        if not holds_arrays(file) and _name_of_file(file) not in gone:
            (new / ITEM / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(old / ITEM / file, new / ITEM / file)
    _edit(new / ITEM / _METADATA, lambda content: _of_leaves(content, leaves))
    _edit(new / ITEM / _SHARDING, lambda content: _shardings_of(content, leaves))
    sealed = seal_files(new / ITEM)
    write_manifest(new / ITEM, manifest.identity, leaves, manifest.metadata, sealed)
    # Verify the copy before it replaces the original.
    check_complete(new / ITEM, read_manifest(new / ITEM))
    replace_step(root, step, new)


def _edit(path: Path, change: Callable[[dict], dict]) -> None:
    if path.exists():  # Only Orbax's own restore without an abstract tree reads it.
        path.write_text(json.dumps(change(json.loads(path.read_bytes()))))


def _of_leaves(content: dict, leaves: Iterable[str]) -> dict:
    """Restricts Orbax's description of the tree to these leaves."""
    entries = content["tree_metadata"]
    kept = {
        key: entry
        for key, entry in entries.items()
        if entry["key_metadata"][0]["key"] in leaves
    }
    return content | {"tree_metadata": kept}


def _shardings_of(content: dict, leaves: Iterable[str]) -> dict:
    named = {base64.b64encode(name.encode()).decode() for name in leaves}
    return {name: sharding for name, sharding in content.items() if name in named}
