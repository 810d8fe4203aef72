"""Loads a local step; files that a host lacks are copied from a peer and verified."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fsdp_jax._box import box_of, index_in, overlap, shape_of
from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._assets import FOLDER as FILES
from fsdp_jax.checkpoint._leaf_names import Leaf, flatten, unflatten
from fsdp_jax.checkpoint._manifest import DamagedCheckpointError
from fsdp_jax.checkpoint._matching import Options, match
from fsdp_jax.checkpoint._multihost import exchange, gather, together
from fsdp_jax.checkpoint._objects import (
    FOLDER,
    Captured,
    Extra,
    Stored,
    capture,
    choose_extras,
    restore_extras,
)
from fsdp_jax.checkpoint._typed_json import decode
from fsdp_jax.checkpoint.local._assets import is_file, names_of, write_files
from fsdp_jax.checkpoint.local._format import (
    SUFFIX,
    Bytes,
    Header,
    file_name,
    header_from_json,
    open_file,
    parse,
)
from fsdp_jax.checkpoint.local._layout import layout_of, logical_box
from fsdp_jax.checkpoint.local._plan import (
    Fetch,
    LocalStep,
    add_copies,
    choose_files,
    find,
    plan_fetches,
    step_of,
)
from fsdp_jax.checkpoint.local._transport import send

_LOADING = "Loading a local step"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Request of a load.

    Attributes:
      like: Abstract state.
      extras: Objects whose state to restore.
    """

    like: PyTree
    extras: Mapping[str, Extra]

    @functools.cached_property
    def captured(self) -> Captured:
        """Current states of the objects, with the shardings of their arrays."""
        return capture(self.extras)

    @functools.cached_property
    def leaves(self) -> dict[str, Leaf]:
        """All leaves to fill, of the state and of the objects."""
        return flatten(self.like) | self.captured.leaves


@dataclasses.dataclass(frozen=True)
class Restored:
    """A loaded local step.

    Attributes:
      step: Number of the step.
      state: Arrays in the structure and sharding of the abstract state.
      metadata: Metadata of the step.
      complete: Folders of this and the older complete steps, oldest first.
      folder: Folder of the step on this host.
      files: Names under which the step has files.
    """

    step: int
    state: PyTree
    metadata: dict[str, Any]
    complete: list[str]
    folder: Path
    files: list[str]

    def find(self, name: str) -> Path:
        """Returns the folder of the files with a name.

        Raises:
          ValueError: If the step has no files of that name.
        """
        if name not in self.files:
            raise ValueError(
                f"'{self.folder}' carries no files {name!r}: it has "
                f"{', '.join(self.files) or 'none'}."
            )
        return self.folder / FILES / name


def survey(
    directory: Path, places: Sequence[str], timeout_secs: float
) -> list[LocalStep]:
    """Returns every save with at least one file left, newest first.

    Args:
      directory: Directory of the run on this host.
      places: Directory of each present process.
      timeout_secs: Seconds without an answer after which another process has failed.
    """
    return find(gather(_LOADING, lambda: _inventory(directory), timeout_secs), places)


def load_newest(
    directory: Path,
    wanted: Wanted,
    steps: range,
    places: Sequence[str],
    timeout_secs: float,
) -> Restored | None:
    """Loads the newest step of which the hosts together have an undamaged copy.

    Args:
      directory: Directory of the run on this host.
      wanted: Leaves to fill, on any mesh.
      steps: Acceptable steps.
      places: Directory of each present process.
      timeout_secs: Seconds without an answer after which another process has failed.

    Returns:
      Loaded step, or None if there is none; the log says why each step was skipped.

    Raises:
      ValueError: If the step does not fit `wanted`.
    """
    found = survey(directory, places, timeout_secs)
    older = [one for one in found if one.step in steps]
    while older:
        found = older.pop(0)
        loaded = _Loading(directory, found, wanted, timeout_secs).run()
        if loaded is not None:
            complete = [found, *(one for one in older if one.is_complete)]
            state, header = loaded
            return Restored(
                found.step,
                state,
                decode(header.about["metadata"]),
                [one.folder for one in reversed(complete)],
                directory / found.folder,
                names_of(header.layout.leaves),
            )
    return None


class _Loading:
    """Load of one step."""

    def __init__(
        self,
        directory: Path,
        found: LocalStep,
        wanted: Wanted,
        timeout_secs: float,
    ):
        self._folder = directory / found.folder
        self._found = found
        self._wanted = wanted
        self._timeout_secs = timeout_secs

    def run(self) -> tuple[PyTree, Header] | None:
        """Returns state and header, or None if the step is incomplete or damaged."""
        if not self._found.is_complete:
            _log(self._found.what_is_lost())
            return None
        header, own = self._headers()
        with self._together():
            objects = self._check_fits(header, own)
            target = layout_of(self._wanted.leaves)
        # Each round leaves out the files found damaged, and chooses again.
        while self._found.is_complete:
            chosen = choose_files(self._found, header.layout, target)
            fetches = plan_fetches(self._found, add_copies(self._found, chosen))
            damaged = self._damaged(chosen, fetches)
            if not damaged:
                return self._read(chosen, fetches, objects), header
            self._found = self._found.without(damaged)
        _log(self._found.what_is_lost())
        return None

    def _headers(self) -> tuple[Header, list[dict[str, Any]]]:
        """Returns the header of one file, and the own values of each saving process.

        Processes that have the files send them to those that have none.
        """
        rank, owners = jax.process_index(), self._found.owners
        with self._together():
            mine = {
                writer: open_file(self._folder / file_name(writer)).header
                for writer in owners
                if rank == owners[writer][0]
            }
        first = min(owners)
        full = mine[first].as_json() if first in mine else None
        own = {str(writer): header.own for writer, header in mine.items()}
        told = exchange([full, own], self._timeout_secs)
        (header,) = [header_from_json(one) for one, _ in told if one is not None]
        by_writer = {int(p): one for _, some in told for p, one in some.items()}
        return header, [
            by_writer.get(p, {}) for p in range(len(self._found.duplicates))
        ]

    def _check_fits(self, header: Header, own: list[dict[str, Any]]) -> Stored:
        about, wanted = header.about, self._wanted
        stored: dict[str, tuple[int | None, list[Any]]] = {
            name: (len(own), [one[name] for one in own])
            if name in about["own"]
            else (None, [document])
            for name, document in about["extras"].items()
        }
        objects = choose_extras(self._folder, stored, wanted.extras)
        match(
            str(self._folder),
            {n: x for n, x in header.layout.leaves.items() if not is_file(n)},
            wanted.leaves,
            Options(impls=about["impls"]),
            list(objects.names),
            [f"{FOLDER}.{name}" for name in wanted.extras],
        )
        return objects

    def _together(self) -> AbstractContextManager[None]:
        return together(_LOADING, self._timeout_secs)

    def _damaged(
        self, chosen: Sequence[Sequence[int]], fetches: Sequence[Sequence[Fetch]]
    ) -> list[tuple[int, int]]:
        """Verifies files to be read or sent; returns `(owner, writer)` of bad ones."""
        rank = jax.process_index()
        mine = {p for p in chosen[rank] if rank in self._found.owners[p]}
        sent = [f.writer for one in fetches for f in one if f.source == rank]
        told = gather(
            _LOADING,
            lambda: self._verify(sorted(mine.union(sent))),
            self._timeout_secs,
        )
        return [(owner, p) for owner, writers in enumerate(told) for p in writers]

    def _verify(self, writers: Sequence[int]) -> list[int]:
        damaged = []
        for writer in writers:
            try:
                open_file(self._folder / file_name(writer)).check()
            except DamagedCheckpointError as error:
                _log(f"{error} The copy of another process is taken if there is one.")
                damaged.append(writer)
        return damaged

    def _read(
        self,
        chosen: Sequence[Sequence[int]],
        fetches: Sequence[Sequence[Fetch]],
        objects: Stored,
    ) -> PyTree:
        for one in fetches:
            self._fetch(one)
        with self._together():
            names = [self._folder / file_name(p) for p in chosen[jax.process_index()]]
            wanted = self._wanted
            values = _assemble(names, wanted.leaves)
            restore_extras(wanted.extras, wanted.captured, objects, values)
            write_files(open_file(names[0]), self._folder)
        return unflatten(wanted.like, values)

    def _fetch(self, fetches: Sequence[Fetch]) -> None:
        """Runs one round of copies; the receiver keeps its file as its copy."""
        rank = jax.process_index()
        content = None
        with self._together():
            for fetch in fetches:
                if fetch.source == rank:
                    path = self._folder / file_name(fetch.writer)
                    content = np.memmap(path, np.uint8, "r")
        size = 0 if content is None else len(content)
        sizes = dict(enumerate(exchange(size, self._timeout_secs)))
        with self._together():
            pairs = [fetch.pair for fetch in fetches]
            received = send(pairs, content, sizes, self._timeout_secs)
            for fetch in fetches:
                if fetch.destination == rank and received is not None:
                    self._keep(fetch, received)

    def _keep(self, fetch: Fetch, content: Bytes) -> None:
        path = self._folder / file_name(fetch.writer)
        parse(f"{path} from process {fetch.source}", content, path).check()
        self._folder.mkdir(parents=True, exist_ok=True)
        # Processes that share a directory may receive the same file.
        part = path.with_suffix(f".{jax.process_index()}.part")
        with part.open("wb") as file:
            file.write(content.data)
        part.rename(path)
        _log(
            f"'{path}' was restored from process {fetch.source}: "
            f"{len(content):,} bytes, verified."
        )


def _inventory(directory: Path) -> dict[str, Any]:
    """Lists local folders: writers of their files, and facts in their headers."""
    inventory: dict[str, Any] = {}
    for path in sorted(directory.glob(f"*/*{SUFFIX}")):
        folder = path.parent.name
        if step_of(folder) is None or not path.stem.isdecimal():
            continue
        try:
            header = open_file(path).header
        except DamagedCheckpointError as error:
            _log(f"{error} The copy of another process is taken if there is one.")
            continue
        about = header.about
        entry = inventory.setdefault(
            folder,
            {
                "writers": [],
                "duplicates": _duplicates(header),
                "replication_groups": about["replication_groups"],
                "hosts": about["hosts"],
                "places": about["places"],
            },
        )
        entry["writers"].append(header.process)
    return inventory


def _duplicates(header: Header) -> list[int]:
    """Returns, for each process, the first one with the same file contents."""
    count = len(header.about["hosts"])
    return (
        list(range(count)) if header.about["own"] else header.layout.duplicates(count)
    )


def _assemble(paths: Sequence[Path], like: Mapping[str, Leaf]) -> dict[str, jax.Array]:
    """Assembles each leaf in its sharding from the shards in some files."""
    shards: dict[str, list] = {name: [] for name in like}
    for path in paths:
        for (name, box), data in open_file(path).read().items():
            if not is_file(name):
                shards[name].append((box, data))
    return {name: _fill(leaf, shards[name]) for name, leaf in like.items()}


def _fill(leaf: Leaf, shards: Sequence[tuple[Any, np.ndarray]]) -> jax.Array:
    shape, logical = tuple(leaf.value.shape), tuple(leaf.shape)

    def part(index: Any) -> np.ndarray:
        own = box_of(index, shape)
        # A new buffer, since jax may alias it; the padding stays zero.
        filled = np.zeros(shape_of(own), leaf.value.dtype)
        wanted = logical_box(index, shape, logical)
        for box, data in shards:
            common = overlap(box, wanted)
            if common is not None:
                filled[index_in(common, own)] = data[index_in(common, box)]
        return filled

    return jax.make_array_from_callback(shape, leaf.value.sharding, part)


def _log(message: str) -> None:
    logging.getLogger("fsdp_jax").warning("%s", message)
