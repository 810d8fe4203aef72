"""The index of a checkpoint of several files: which file holds which tensor."""

from pathlib import Path
from typing import Any

from bridge._json import read_json
from bridge._safetensors import TensorInfo, read_header


def read_sharded(index: Path) -> dict[str, TensorInfo]:
    """Reads an index and the headers of the files it names; no data.

    Args:
      index: Path of the index. Its files lie beside it.

    Returns:
      Each tensor's place, by name, in the order of the index.

    Raises:
      ValueError: If the index names what is no file beside it, or it and the headers
        disagree on any tensor. Everything that is wrong is listed.
    """
    files = parse_index(read_json(index, f"The index '{index}'"), f"'{index}'")
    _check_names(index, set(files.values()))
    found, wrong = {}, []
    for file in sorted(set(files.values())):
        try:
            found[file] = read_header(index.parent / file)
        except (ValueError, FileNotFoundError) as error:
            wrong.append(f"  {error}")
    # A tensor missing from a file that cannot be read would be that file's fault.
    wrong = wrong or _disagreements(files, found)
    if wrong:
        raise ValueError(f"'{index}' does not fit its files:\n" + "\n".join(wrong))
    return {key: found[file][key] for key, file in files.items()}


def parse_index(fields: dict[str, Any], subject: str) -> dict[str, str]:
    """Returns the file name of each tensor.

    Args:
      fields: The whole index.
      subject: What it is, to begin the error message.

    Raises:
      ValueError: If it names no files.
    """
    files = fields.get("weight_map")
    if (
        not isinstance(files, dict)
        or not files
        or not all(isinstance(file, str) for file in files.values())
    ):
        raise ValueError(f"{subject} has no 'weight_map' from tensor to file name.")
    return files


def _check_names(index: Path, files: set[str]) -> None:
    # An index is a stranger's text: a plain file name cannot leave the directory.
    wrong = [
        f"  {file!r} " + ("is absent" if _is_plain(file) else "is no file name")
        for file in sorted(files)
        if not _is_plain(file) or not (index.parent / file).exists()
    ]
    if wrong:
        raise ValueError(
            f"'{index}' names files that are not beside it:\n" + "\n".join(wrong)
        )


def _is_plain(file: str) -> bool:
    return file not in ("", "..") and "\0" not in file and Path(file).name == file


def _disagreements(
    files: dict[str, str], found: dict[str, dict[str, TensorInfo]]
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
