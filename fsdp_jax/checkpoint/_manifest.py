"""Manifest of a step: its leaves, and a size or digest of each file.

Data files are checked by size and by the checksum of each chunk inside them: a digest
of the whole file would read back all that was just written and make a save a third
slower (measured). Every other file has a SHA-256.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

NAME = "manifest.json"
# Files that are not in the manifest: itself, and the marker that Orbax writes after it.
_LATER = {NAME, "commit_success.txt"}


class DamagedCheckpointError(ValueError):
    """Data read differs from the data written; no value of it is returned."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a step.

    Attributes:
      size: Size in bytes.
      sha256: Digest in hex; None for a data file.
    """

    size: int
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of a step.

    Attributes:
      leaves: Shape and dtype of every leaf, by dotted name.
      files: Every file, by its path in the step.
      metadata: User metadata, encoded by `_typed_json`.
      digest: Digest of names, shapes and dtypes, equal for steps that load into the
        same abstract state.
    """

    leaves: dict[str, jax.ShapeDtypeStruct]
    files: dict[str, File]
    metadata: Any
    digest: str


def tree_digest(leaves: dict[str, Any]) -> str:
    """Returns an order-independent digest of the leaves' names, shapes and dtypes."""
    return _sha256_of(_leaves_as_json(leaves))


def write_manifest(directory: Path, leaves: dict[str, Any], metadata: Any) -> None:
    """Writes the manifest of the files in `directory`, as the step's last file."""
    body = {
        "leaves": _leaves_as_json(leaves),
        "digest": tree_digest(leaves),
        "files": {
            name: dataclasses.asdict(file)
            for name, file in _describe(directory, _files(directory)).items()
        },
        "metadata": metadata,
    }
    text = json.dumps({"body": body, "sha256": _sha256_of(body)})
    (directory / NAME).write_text(text)


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest of a step.

    Raises:
      DamagedCheckpointError: If the manifest is not as it was written.
    """
    try:
        content = json.loads((directory / NAME).read_bytes())
        body, digest = content["body"], content["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(directory, [f"{NAME}: unreadable ({error})"]) from error
    if _sha256_of(body) != digest:
        raise damaged(directory, [f"{NAME}: its digest differs"])
    return Manifest(
        leaves={
            name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
            for name, (shape, dtype) in body["leaves"].items()
        },
        files={name: File(**file) for name, file in body["files"].items()},
        metadata=body["metadata"],
        digest=body["digest"],
    )


def check_files(directory: Path, manifest: Manifest) -> None:
    """Checks the files of a step against its manifest, without the values in them.

    Reading a value verifies the checksum of its chunk; `check_whole` reads all values.

    Raises:
      DamagedCheckpointError: If files are missing or differ; lists all of them.
    """
    present = _describe(directory, set(_files(directory)) & manifest.files.keys())
    problems = []
    for name, file in manifest.files.items():
        if name not in present:
            problems.append(f"{name}: missing")
        elif present[name].size != file.size:
            problems.append(f"{name}: its size differs")
        elif present[name] != file:
            problems.append(f"{name}: its digest differs")
    if problems:
        raise damaged(directory, problems)


def damaged(directory: Path, problems: list[str]) -> DamagedCheckpointError:
    """Returns the error for a damaged step, with its problems and the fix."""
    return DamagedCheckpointError(
        f"'{directory}' is damaged in {len(problems)} place(s):\n  "
        + "\n  ".join(sorted(problems))
        + '\nCopy it again, load another step, or load with step="latest-good".'
    )


def holds_arrays(name: str) -> bool:
    """Returns whether a file of a step belongs to the OCDBT store of the arrays."""
    return bool(re.fullmatch(r"(ocdbt\.process_\d+/)?(manifest\.ocdbt|d/[^/]+)", name))


def _holds_values(name: str) -> bool:
    """Returns whether a file is an OCDBT data file, which has a checksum per chunk."""
    return bool(re.fullmatch(r"(ocdbt\.process_\d+/)?d/[^/]+", name))


def _files(directory: Path) -> list[str]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    names = (path.relative_to(directory).as_posix() for path in paths)
    return sorted(name for name in names if name not in _LATER)


def _describe(directory: Path, names: Iterable[str]) -> dict[str, File]:
    return {
        name: File((directory / name).stat().st_size, None)
        if _holds_values(name)
        else _describe_file(directory / name)
        for name in names
    }


def _describe_file(path: Path) -> File:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return File(file.tell(), sha256)


def _leaves_as_json(leaves: dict[str, Any]) -> dict[str, Any]:
    return {n: [list(x.shape), jnp.dtype(x.dtype).name] for n, x in leaves.items()}


def _sha256_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
