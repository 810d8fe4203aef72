"""Index of a multi-file checkpoint: the file name of each tensor."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

from bridge.formats._json import read_json

Tensor = TypeVar("Tensor")
"""Location of a tensor, in a type of its file format."""


def read_sharded(
    index: Path, read_file: Callable[[Path], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Reads an index and the headers of its files, but no data.

    Args:
      index: Path of the index, in the directory of its files.
      read_file: Function that returns the location of each tensor of a file by name.

    Returns:
      Location of each tensor by name, in the order of the index.

    Raises:
      ValueError: If the index names a file that is not in its directory, or index and
        headers disagree on a tensor. All errors are listed.
    """
    files = read_index(index)
    found, wrong = {}, []
    for file in sorted(set(files.values())):
        try:
            found[file] = read_file(index.parent / file)
        except FileNotFoundError:
            wrong.append(f"  {file!r} is absent")
        except ValueError as error:
            wrong.append(f"  {error}")
    # Skipped if a file cannot be read: all of its tensors would be reported missing.
    wrong = wrong or _disagreements(files, found)
    if wrong:
        raise ValueError(f"'{index}' does not fit its files:\n" + "\n".join(wrong))
    return {key: found[file][key] for key, file in files.items()}


def read_index(index: Path) -> dict[str, str]:
    """Returns the file name of each tensor; reads only the index.

    Args:
      index: Path of the index.

    Raises:
      ValueError: If it is not an index, or names something other than plain files.
    """
    files = read_json(index, f"The index '{index}'").get("weight_map")
    if (
        not isinstance(files, dict)
        or not files
        or not all(isinstance(file, str) for file in files.values())
    ):
        raise ValueError(f"'{index}' has no 'weight_map' from tensor to file name.")
    # The index is untrusted: only a plain file name cannot leave the directory.
    wrong = sorted({file for file in files.values() if not _is_plain(file)})
    if wrong:
        lines = [f"  {file!r} is not a file name" for file in wrong]
        raise ValueError(f"'{index}' names what is not beside it:\n" + "\n".join(lines))
    return files


def _is_plain(file: str) -> bool:
    return file not in ("", "..") and "\0" not in file and Path(file).name == file


def _disagreements(
    files: dict[str, str], found: Mapping[str, Collection[str]]
) -> list[str]:
    return [
        f"  tensor {key!r} is not in {file!r}"
        for key, file in files.items()
        if key not in found[file]
    ] + [
        f"  {file!r} holds {key!r}, which the index "
        + (f"places in {files[key]!r}" if key in files else "does not name")
        for file, tensors in found.items()
        for key in tensors
        if files.get(key) != file
    ]
