"""The index of a checkpoint of several files: which file holds which tensor."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

from bridge.formats._json import read_json

Tensor = TypeVar("Tensor")
"""Where a tensor lies, as its format says it."""


def read_sharded(
    index: Path, read_file: Callable[[Path], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Reads an index and the headers of the files it names; no data.

    Args:
      index: Path of the index. Its files lie beside it.
      read_file: Returns each tensor's place in a file, by name.

    Returns:
      Each tensor's place, by name, in the order of the index.

    Raises:
      ValueError: If the index names what is no file beside it, or it and the headers
        disagree on any tensor. Everything that is wrong is listed.
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
    # A tensor missing from a file that cannot be read would be that file's fault.
    wrong = wrong or _disagreements(files, found)
    if wrong:
        raise ValueError(f"'{index}' does not fit its files:\n" + "\n".join(wrong))
    return {key: found[file][key] for key, file in files.items()}


def read_index(index: Path) -> dict[str, str]:
    """Returns the file name of each tensor; looks at no other file.

    Args:
      index: Path of the index.

    Raises:
      ValueError: If it is no index, or what it names are no file names.
    """
    files = read_json(index, f"The index '{index}'").get("weight_map")
    if (
        not isinstance(files, dict)
        or not files
        or not all(isinstance(file, str) for file in files.values())
    ):
        raise ValueError(f"'{index}' has no 'weight_map' from tensor to file name.")
    # An index is a stranger's text: a plain file name cannot leave the directory.
    wrong = sorted({file for file in files.values() if not _is_plain(file)})
    if wrong:
        lines = [f"  {file!r} is no file name" for file in wrong]
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
