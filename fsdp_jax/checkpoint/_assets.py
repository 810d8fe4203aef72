"""Files saved in a step, such as a tokenizer's."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdp_jax.checkpoint._manifest import Manifest
from fsdp_jax.checkpoint._paths import files_in, is_local
from fsdp_jax.checkpoint._steps import Step, open_step

# A file, a directory of files, or several of these, which keep their names.
Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

# Folder of a step with the `files` of `save`.
FOLDER = "files"


def load_files(path: str | os.PathLike[str], name: str, *, step: Step = None) -> Path:
    """Returns the folder of files saved in a step, verified.

    Args:
      path: Directory that `save` wrote to.
      name: Name in the `files` of `save`.
      step: Step to read, as in `load`.

    Returns:
      Folder inside the step, read only; of a step in an object store, a copy of it.

    Raises:
      ValueError: If there is no such step, or no files of that name.
      DamagedCheckpointError: If the step is not as it was written.
    """
    directory, manifest = open_step(path, step)
    names = names_of_files(manifest)
    if name not in names:
        raise ValueError(
            f"'{directory.parent}' carries no files {name!r}: it has "
            f"{', '.join(names) or 'none'}."
        )
    folder = directory / FOLDER / name
    return folder if is_local(folder) else copy_for_process(folder)


def copy_for_process(folder: Any) -> Path:
    """Copies a folder to this machine, for this process's life.

    Args:
      folder: Folder of a step, of an object store or of a step that may be deleted.
    """
    local = Path(tempfile.mkdtemp(prefix="fsdp_jax-files-"))
    atexit.register(shutil.rmtree, local, ignore_errors=True)
    for name in files_in(folder):
        path = local / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((folder / name).read_bytes())
    return local


def names_of_files(manifest: Manifest) -> list[str]:
    """Returns the names under which a step has files."""
    inside = [file.split("/") for file in manifest.files]
    return sorted({parts[1] for parts in inside if parts[0] == FOLDER})


def find_files(files: Mapping[str, Files]) -> dict[str, Path]:
    """Returns the source of each file to copy into a step, by its path there.

    Raises:
      ValueError: If a path is neither a file nor a directory of files, or a name is not
        an identifier.
    """
    found, problems = {}, unusable_names(files)
    for name, given in files.items():
        one = isinstance(given, str | os.PathLike)
        for path in [Path(given)] if one else map(Path, given):
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            sources = [path] if path.is_file() else inside
            if not sources:
                problems.append(
                    f"{name}: '{path}' is not a file, or directory of files"
                )
            root = path if one and path.is_dir() else path.parent
            for file in sources:
                found[f"{FOLDER}/{name}/{file.relative_to(root).as_posix()}"] = file
    if problems:
        raise ValueError("files: " + "; ".join(problems) + ".")
    return found


def unusable_names(names: Mapping[str, object]) -> list[str]:
    """Returns a message for each name that cannot become a file name."""
    return [f"{name!r} is not a word" for name in names if not name.isidentifier()]
