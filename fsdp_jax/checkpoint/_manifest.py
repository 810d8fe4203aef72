"""Manifest of a step: its identity, its leaves, and a seal of each file.

The seal of a data file is a digest of all but the values, each of which is followed by
its own checksum (see `_seal`); that of every other file is a digest of all its bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax.checkpoint._bucket import ObjectStoreError, is_outage, outage
from fsdp_jax.checkpoint._paths import files_in, is_local, of_other_size
from fsdp_jax.checkpoint._seal import Seal, seal
from fsdp_jax.checkpoint._zarr import root_cause

NAME = "manifest.json"
# Folder of a step that holds its arrays and its manifest.
ITEM = "state"
# Increased when older readers, or older steps, could be misread.
FORMAT = 2
# What reading JSON of another kind than expected may raise.
MISREAD = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
    OSError,
)
# Of the values in a tree's nodes, at most: each has a key and an index beside it.
_MAX_RATIO = 1024
# Files that are not in the manifest: itself, and the marker that Orbax writes after it.
_LATER = {NAME, "commit_success.txt"}


class DamagedCheckpointError(ValueError):
    """Data read differs from the data written; no value of it is returned."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """Identity of the save that wrote a step.

    Attributes:
      step: Number of the step, which is that of its folder and of its state.
      run: Id of the run, that of its directory.
      attempt: Random id of the save.
    """

    step: int
    run: str
    attempt: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of a step.

    Attributes:
      identity: Step, run and attempt.
      leaves: Shape and dtype of every leaf, by dotted name.
      files: Seal of every file, by its path in the step.
      metadata: User metadata, encoded by `_typed_json`.
      digest: Digest of names, shapes and dtypes, equal for steps that load into the
        same abstract state.
    """

    identity: Identity
    leaves: dict[str, jax.ShapeDtypeStruct]
    files: dict[str, Seal]
    metadata: Any
    digest: str

    @property
    def max_bytes(self) -> int:
        """Bytes that the values in the data files can be, when decompressed."""
        files = self.files.items()
        return _MAX_RATIO * sum(s.size for name, s in files if is_data_file(name))


def tree_digest(leaves: dict[str, Any]) -> str:
    """Returns an order-independent digest of the leaves' names, shapes and dtypes."""
    return _sha256_of(_leaves_as_json(leaves))


def write_manifest(
    directory: Path,
    identity: Identity,
    leaves: dict[str, Any],
    metadata: Any,
    sealed: Mapping[str, Seal],
) -> None:
    """Writes the manifest of the files in `directory`, as the step's last file.

    Args:
      directory: State directory of the step.
      identity: Step, run and attempt.
      leaves: Arrays or abstract arrays, by name.
      metadata: User metadata, encoded.
      sealed: Seals that are known, by path; other files are read as a whole.
    """
    files = {
        name: sealed[name] if name in sealed else seal(directory / name)
        for name in _files(directory)
    }
    body = {
        "format": FORMAT,
        **dataclasses.asdict(identity),
        "leaves": _leaves_as_json(leaves),
        "digest": tree_digest(leaves),
        "files": {name: dataclasses.asdict(one) for name, one in files.items()},
        "metadata": metadata,
    }
    text = json.dumps({"body": body, "sha256": _sha256_of(body)})
    (directory / NAME).write_text(text)


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest of a step.

    Raises:
      DamagedCheckpointError: If the manifest is not as it was written.
      ValueError: If another version wrote it, in a format that this one cannot verify.
    """
    with reading(directory, NAME):
        content = json.loads(read_regular(directory, NAME))
        body, digest = content["body"], content["sha256"]
        known, version = _sha256_of(body), body.get("format", 1)
    if known != digest:
        raise damaged(directory, [f"{NAME}: its digest differs"])
    if version != FORMAT:
        raise ValueError(
            f"'{directory}' is in format {version!r}, and this version of fsdp_jax "
            f"reads format {FORMAT} only. Load it with the version that wrote it, and "
            "export the weights."
        )
    with reading(directory, NAME, "mistyped"):
        manifest = _parse(body)
        problems = [*_misplaced(directory, manifest), *_overclaimed(manifest)]
    if problems:
        raise damaged(directory, problems)
    return manifest


def read_regular(directory: Path, name: str) -> bytes:
    """Returns the content of a file of a step.

    Raises:
      ValueError: If it is no regular file, such as a link out of the step.
    """
    if not is_regular(directory, name):
        raise ValueError("no regular file")
    return (directory / name).read_bytes()


def is_regular(directory: Path, name: str) -> bool:
    """Returns whether a file of a step is one, and not reached by a link."""
    path = directory
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            return False
    return path.is_file()


def _is_plain(directory: Path, name: str) -> bool:
    return not (directory / name).exists() or is_regular(directory, name)


def _parse(body: dict[str, Any]) -> Manifest:
    """Returns the manifest from JSON types.

    Raises:
      TypeError, ValueError, KeyError: If a value has another type than was written.
    """
    step, run, attempt = body["step"], body["run"], body["attempt"]
    _expect(int, step)
    _expect(str, run, attempt, body["digest"])
    return Manifest(
        identity=Identity(step, run, attempt),
        leaves={name: _leaf_from_json(leaf) for name, leaf in body["leaves"].items()},
        files={name: seal_from_json(file) for name, file in body["files"].items()},
        metadata=body["metadata"],
        digest=body["digest"],
    )


def _leaf_from_json(value: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = value
    _expect(str, dtype)
    _expect(int, *shape)
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {shape}")
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _expect(kind: type, *values: Any) -> None:
    for value in values:
        if type(value) is not kind:  # `True` is an instance of int.
            raise TypeError(f"{value!r:.40} is not a {kind.__name__}")


def _misplaced(directory: Path, manifest: Manifest) -> list[str]:
    """Returns a message for each file outside of the step, or reached by a link."""
    problems = []
    for name in manifest.files:
        parts = name.split("/")
        if name.startswith("/") or {"", ".", ".."} & set(parts) or "\\" in name:
            problems.append(f"{NAME}: {name!r} is not a path inside of the step")
        elif is_local(directory) and not _is_plain(directory, name):
            problems.append(f"{name}: a link, or no regular file")
    return problems


def _overclaimed(manifest: Manifest) -> list[str]:
    """Returns a message if the leaves take far more bytes than the files have.

    Such a claim must not make a reader allocate memory for it. Every value is stored,
    and only those in the tree's own nodes, of less than 1 KiB each, are compressed.
    """
    claimed = sum(
        math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
        for leaf in manifest.leaves.values()
    )
    if claimed <= manifest.max_bytes:
        return []
    return [f"{NAME}: leaves of {claimed:,} bytes, at most {manifest.max_bytes:,}"]


def seal_from_json(value: dict[str, Any]) -> Seal:
    """Returns a seal from JSON types; inverse of `dataclasses.asdict`.

    Raises:
      TypeError, ValueError, KeyError: If it is not one.
    """
    size, digest = value["size"], value["sha256"]
    spans = tuple((start, stop) for start, stop in value["values"])
    _expect(int, size, *itertools.chain(*spans))
    _expect(str, digest)
    ends = [0, *itertools.chain(*spans), size]
    if sorted(ends) != ends:
        raise ValueError(f"spans beyond a file of {size} bytes")
    return Seal(size, digest, spans)


def check_files(directory: Path, manifest: Manifest) -> None:
    """Checks the files of a step against its manifest, data files by their sizes.

    Raises:
      DamagedCheckpointError: If files are missing or differ; lists all of them.
    """
    names = set(_files(directory))
    problems = []
    sizes = {name: one.size for name, one in manifest.files.items() if name in names}
    resized = of_other_size(directory, sizes)
    for name, sealed in manifest.files.items():
        if name not in names:
            problems.append(f"{name}: missing")
        elif name in resized:
            problems.append(f"{name}: its size differs")
        elif not is_data_file(name) and seal(directory / name) != sealed:
            problems.append(f"{name}: its digest differs")
    if problems:
        raise damaged(directory, problems)


def check_seals(
    directory: Path, manifest: Manifest, rank: int = 0, count: int = 1
) -> None:
    """Checks that every chunk in the data files is the one that was written there.

    Reading a value then verifies it by the checksum behind it.

    Args:
      directory: State directory of the step, after `check_files`.
      manifest: Manifest of the step.
      rank: Share of the files to check, of `count`; all shares together are all files.
      count: Number of shares.

    Raises:
      DamagedCheckpointError: If files differ; lists all of them.
    """
    names = [name for name in sorted(manifest.files) if is_data_file(name)]
    problems = [
        f"{name}: it holds other chunks than were written"
        for name in names[rank::count]
        if seal(directory / name, manifest.files[name].values) != manifest.files[name]
    ]
    if problems:
        raise damaged(directory, problems)


def check_identity(directory: Path, found: Identity, step: int, run: str | None):
    """Checks that a step is the one that its folder says.

    Args:
      directory: State directory of the step.
      found: Identity in its manifest.
      step: Number of its folder.
      run: Id of the run that saves to the directory above; None if there is none.

    Raises:
      DamagedCheckpointError: If the step is another one.
    """
    problems = []
    if found.step != step:
        problems.append(f"{NAME}: of step {found.step}, in the folder of step {step}")
    if run is not None and found.run != run:
        problems.append(f"{NAME}: of run {found.run}, in a directory of run {run}")
    if problems:
        raise damaged(directory, problems)


@contextlib.contextmanager
def reading(directory: Path, name: str, how: str = "unreadable") -> Iterator[None]:
    """Turns the errors of reading JSON into one for a damaged step.

    Args:
      directory: State directory of the step.
      name: File that is read.
      how: Word for the file in the message, if reading it fails.

    Raises:
      DamagedCheckpointError: If the file is not as it was written.
      ObjectStoreError: If the store does not answer, which is not damage.
    """
    try:
        yield
    except ObjectStoreError:
        raise
    except MISREAD as error:
        raise damaged(directory, [f"{name}: {how} ({error})"]) from error


def unreadable(directory: Path, error: Exception) -> Exception:
    """Returns the error for arrays that TensorStore cannot read."""
    if not is_local(directory) and is_outage(error):
        return outage(directory, error)
    return damaged(directory, [root_cause(error)])


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


def is_data_file(name: str) -> bool:
    """Returns whether a file is an OCDBT data file, which has a checksum per chunk."""
    return bool(re.fullmatch(r"(ocdbt\.process_\d+/)?d/[^/]+", name))


def _files(directory: Path) -> list[str]:
    return [name for name in files_in(directory) if name not in _LATER]


def _leaves_as_json(leaves: dict[str, Any]) -> dict[str, Any]:
    return {n: [list(x.shape), jnp.dtype(x.dtype).name] for n, x in leaves.items()}


def _sha256_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
