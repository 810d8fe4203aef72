"""Files that a step carries, such as a tokenizer's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from fsdp_jax.checkpoint._manifest import Manifest
from fsdp_jax.checkpoint._steps import Step, open_step

# A file, a directory of files, or several of these, each by its own name.
Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

# The folder of a step with the files that `save` was given.
FOLDER = "files"


def load_files(path: str | os.PathLike[str], name: str, *, step: Step = None) -> Path:
    """Where the files lie that a step carries; they are as they were saved.

    Args:
      path: The directory that `save` wrote to.
      name: As in the `files` of `save`.
      step: As for `load`.

    Returns:
      The folder within the step, to read from.

    Raises:
      ValueError: If there is no such step, or it carries no such files.
      DamagedCheckpointError: As for `load`.
    """
    directory, manifest = open_step(path, step)
    names = names_of_files(manifest)
    if name not in names:
        raise ValueError(
            f"'{directory.parent}' carries no files {name!r}: it has "
            f"{', '.join(names) or 'none'}."
        )
    return directory / FOLDER / name


def names_of_files(manifest: Manifest) -> list[str]:
    """The names under which a step carries files."""
    inside = [file.split("/") for file in manifest.files]
    return sorted({parts[1] for parts in inside if parts[0] == FOLDER})


def find_files(files: Mapping[str, Files]) -> dict[str, Path]:
    """What to copy into a step: the source of each file, by its place in there.

    Raises:
      ValueError: If a path is no file and no directory of files, or a name no word.
    """
    found, problems = {}, unusable_names(files)
    for name, given in files.items():
        one = isinstance(given, str | os.PathLike)
        for path in [Path(given)] if one else map(Path, given):
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            sources = [path] if path.is_file() else inside
            if not sources:
                problems.append(f"{name}: '{path}' is no file, or directory of files")
            root = path if one and path.is_dir() else path.parent
            for file in sources:
                found[f"{FOLDER}/{name}/{file.relative_to(root).as_posix()}"] = file
    if problems:
        raise ValueError("files: " + "; ".join(problems) + ".")
    return found


def unusable_names(names: Mapping[str, object]) -> list[str]:
    """Of names that become those of files, what is wrong with each that cannot."""
    return [f"{name!r} is no word" for name in names if not name.isidentifier()]
