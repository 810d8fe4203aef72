"""Steps of a checkpoint directory: one committed folder each."""

from __future__ import annotations

import itertools
import operator
import os
import warnings
from pathlib import Path
from typing import Any, Literal

from fsdp_jax._option_types import is_whole
from fsdp_jax.checkpoint import _manifest
from fsdp_jax.checkpoint._manifest import (
    ITEM,
    DamagedCheckpointError,
    Manifest,
    check_files,
    check_identity,
    check_seals,
    read_manifest,
    unreadable,
)
from fsdp_jax.checkpoint._paths import as_path, files_in, is_local
from fsdp_jax.checkpoint._replace import (
    is_committed,
    is_step_name,
    step_folder,
    steps_in,
)
from fsdp_jax.checkpoint._run_id import find_run_id
from fsdp_jax.checkpoint._store_path import COMMIT_MARKER
from fsdp_jax.checkpoint._zarr import read_all

Step = int | Literal["latest-good"] | None


def committed_steps(path: str | os.PathLike[str]) -> list[int]:
    """Returns the committed steps under `path`, oldest first.

    A step is committed if it has both Orbax's commit marker and our manifest.
    Interrupted saves and folders written by other programs are not.
    """
    directory = as_path(path)
    if not is_local(directory):
        return _committed_in_store(directory)
    if not directory.is_dir():
        return []
    steps = steps_in(directory)
    return sorted(step for step in steps if is_committed(step_folder(path, step)))


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """Returns the newest committed step under `path`, or None if there is none.

    An interrupted save is not committed and does not count.

    Args:
      path: Directory that `save` or a `Checkpointer` wrote to; it need not exist.

    Returns:
      Number of the step, or None.

    Examples:
      >>> print(fsdp.latest_step(path))
      None
      >>> fsdp.save(path, fsdp.init_state(plan, tx, params, step=100))
      >>> fsdp.latest_step(path)
      100
    """
    return max(committed_steps(path), default=None)


def resolve_step(path: str | os.PathLike[str], step: Step) -> int:
    """Returns the number of `step`; of the newest step if it is None.

    Raises:
      ValueError: If `path` has no such step, or `step` is no number of one.
    """
    directory = as_path(path)
    if not directory.is_dir():
        is_file = is_local(directory) and directory.exists()
        problem = "it is a file" if is_file else "there is no such directory"
        raise ValueError(f"No checkpoint at '{path}': {problem}.")
    available = committed_steps(path)
    if not available:
        raise ValueError(
            f"No checkpoint at '{path}': it holds no committed step.{_hint(directory)}"
        )
    if step == "latest-good":
        return newest_good(path, available)
    if step is not None and not is_whole(step):
        raise ValueError(
            f"step={step!r} is no number of a step: use an int such as "
            f"{available[-1]}, None for the newest, or 'latest-good'."
        )
    if step is not None and step not in available:
        raise ValueError(
            f"No step {step} in '{path}', which holds {', '.join(map(str, available))}."
        )
    return available[-1] if step is None else operator.index(step)


def _hint(directory: Path) -> str:
    """Returns what to load, if a directory is one step of a run."""
    name, run = directory.name, directory.parent
    if not is_step_name(name) or int(name) not in committed_steps(run):
        return ""
    return f" It is a step itself: load '{run}' with step={int(name)}."


def open_step(path: str | os.PathLike[str], step: Step) -> tuple[Path, Manifest]:
    """Returns the state directory and manifest of a step, with its files checked.

    Data files are checked by their sizes: see `check_seals`.

    Raises:
      ValueError: If there is no such step.
      DamagedCheckpointError: If the step is another one than its folder says, a file is
        missing or has another size, or a file without values differs.
    """
    number = resolve_step(path, step)
    directory = state_directory(path, number)
    manifest = _read_identified(path, number)
    check_files(directory, manifest)
    return directory, manifest


def check_step(path: str | os.PathLike[str], step: int) -> Manifest:
    """Reads every byte of a step, and returns its manifest.

    Raises:
      DamagedCheckpointError: If anything differs from what was written.
    """
    manifest = _read_identified(path, step)
    check_complete(state_directory(path, step), manifest)
    return manifest


def check_complete(directory: Path, manifest: Manifest) -> None:
    """Reads every byte of a step.

    Raises:
      DamagedCheckpointError: If anything differs from what was written.
    """
    check_files(directory, manifest)
    check_seals(directory, manifest)
    try:
        read_all(directory, manifest.leaves, manifest.max_bytes)
    except Exception as error:  # TensorStore raises plain `Exception`s.
        raise unreadable(directory, error) from error


def _read_identified(path: str | os.PathLike[str], step: int) -> Manifest:
    directory = state_directory(path, step)
    manifest = read_manifest(directory)
    check_identity(directory, manifest.identity, step, find_run_id(path))
    return manifest


def set_aside(path: str | os.PathLike[str], step: int, why: str = "damaged") -> Path:
    """Renames a step, so that its number can be saved again.

    Args:
      path: Directory of the run.
      step: Number of the step.
      why: Suffix of the new name.

    Returns:
      New path.
    """
    folder = step_folder(path, step)
    names = (f"{step}.{why}{'-' * bool(n)}{n or ''}" for n in itertools.count())
    places = (as_path(path) / name for name in names)
    # A link to nothing does not exist, and is in the way.
    return folder.rename(
        next(to for to in places if not (to.exists() or to.is_symlink()))
    )


def state_directory(path: str | os.PathLike[str], step: int) -> Path:
    """Returns the folder with the arrays and the manifest of a step."""
    return step_folder(as_path(path).absolute(), step) / ITEM


def _committed_in_store(directory: Any) -> list[int]:
    """Returns the committed steps of a folder in an object store, by one listing."""
    names = set(files_in(directory))
    ends = (COMMIT_MARKER, f"{ITEM}/{_manifest.NAME}")
    steps = {step for step, _, _ in (name.partition("/") for name in names)}
    complete = [s for s in steps if all(f"{s}/{end}" in names for end in ends)]
    return sorted(int(step) for step in complete if is_step_name(step))


def newest_good(path: str | os.PathLike[str], available: list[int]) -> int:
    """Returns the newest step whose bytes are all as written; warns about others.

    Args:
      path: Directory of the run.
      available: Numbers of the steps to look at, oldest first. Each above the one that
        is returned is damaged.

    Raises:
      DamagedCheckpointError: If none is intact.
    """
    for step in reversed(available):
        try:
            check_step(path, step)
        except DamagedCheckpointError as error:
            warnings.warn(f"Step {step} is skipped. {error}", stacklevel=4)
        else:
            return step
    raise DamagedCheckpointError(
        f"No step of '{path}' is intact: {', '.join(map(str, available))} are damaged."
    )
