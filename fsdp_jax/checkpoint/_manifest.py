"""The manifest of a step: what it holds, and how each of its files can be checked.

A file of values is checked by its size and, chunk by chunk, by the checksums within it:
to digest it as a whole would read all that was just written, and make a save by a third
slower (measured). Of every other file there is a SHA-256.
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
# What Orbax writes once the step is finished, after the manifest.
_LATER = {NAME, "commit_success.txt"}


class DamagedCheckpointError(ValueError):
    """What was read is not what was written; no value of it is returned."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a step.

    Attributes:
      size: In bytes.
      sha256: In hex; None for a file of values.
    """

    size: int
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a step holds.

    Attributes:
      leaves: Shape and dtype of every leaf, by dotted name.
      files: Every file, by its path within the step.
      metadata: What the user saved with the step, as `_typed_json` encodes it.
      digest: Of names, shapes and dtypes: equal for what loads into one mould.
    """

    leaves: dict[str, jax.ShapeDtypeStruct]
    files: dict[str, File]
    metadata: Any
    digest: str


def tree_digest(leaves: dict[str, Any]) -> str:
    """A digest of the names, shapes and dtypes of leaves, in any order."""
    return _sha256_of(_leaves_as_json(leaves))


def write_manifest(directory: Path, leaves: dict[str, Any], metadata: Any) -> None:
    """Writes the manifest of what is in `directory`: the last file of a step."""
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
      DamagedCheckpointError: If it is not as it was written.
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
    """Compares the files of a step with its manifest, all but the values in them.

    Whoever reads a value verifies the checksum of its chunk; `check_values` reads all.

    Raises:
      DamagedCheckpointError: If a file is gone or differs; all in one message.
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
    """The error that names what is wrong with a step, and what to do."""
    return DamagedCheckpointError(
        f"'{directory}' is damaged in {len(problems)} place(s):\n  "
        + "\n  ".join(sorted(problems))
        + '\nCopy it again, load another step, or load with step="latest-good".'
    )


def holds_arrays(name: str) -> bool:
    """Whether a file, by its place in the step, is of OCDBT, which holds the arrays."""
    return bool(re.fullmatch(r"(ocdbt\.process_\d+/)?(manifest\.ocdbt|d/[^/]+)", name))


def _holds_values(name: str) -> bool:
    """Whether a file is a data file of OCDBT, checksummed part by part."""
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
