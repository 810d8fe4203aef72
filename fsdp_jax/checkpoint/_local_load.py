"""Reading a local step: what a host lacks comes from a peer, verified."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fsdp_jax.checkpoint._agree import gather
from fsdp_jax.checkpoint._keys import Leaf
from fsdp_jax.checkpoint._local_file import (
    Bytes,
    Header,
    header_from_json,
    open_file,
    parse,
)
from fsdp_jax.checkpoint._local_layout import layout_of, overlap, region_of
from fsdp_jax.checkpoint._local_plan import (
    Fetch,
    Found,
    add_copies,
    choose_files,
    find,
    plan_fetches,
    step_of,
)
from fsdp_jax.checkpoint._manifest import DamagedCheckpointError
from fsdp_jax.checkpoint._replica_transport import send
from fsdp_jax.checkpoint._strict import Options, match

_SUFFIX = ".shards"
_LOADING = "Loading a local step"


@dataclasses.dataclass(frozen=True)
class Restored:
    """What was read of a local step.

    Attributes:
      values: An array by name, in the mould's shape and sharding.
      step: Which step.
      beside: What was saved with it, in types of JSON.
      complete: Folders of this and the complete steps before, the oldest first.
    """

    values: dict[str, jax.Array]
    step: int
    beside: Any
    complete: list[str]


def file_name(saver: int) -> str:
    """Of the file with the shards of a process."""
    return f"{saver}{_SUFFIX}"


def load_newest(
    directory: Path, mould: Mapping[str, Leaf], steps: range, timeout_secs: float
) -> Restored | None:
    """Reads the newest step of which all that is needed is somewhere, and undamaged.

    Args:
      directory: Of the run, on this host.
      mould: What to fill, on any mesh.
      steps: Which steps will do.
      timeout_secs: After so long without an answer another process has failed.

    Returns:
      None if there is no such step; what is wrong with each that is passed over is
      said in the log.

    Raises:
      ValueError: If the step does not hold the leaves of the mould.
    """
    inventories = gather(_LOADING, lambda: _inventory(directory), timeout_secs)
    older = [found for found in find(inventories) if found.step in steps]
    while older:
        found = older.pop(0)
        whole = _Loading(directory, found, mould, timeout_secs).run()
        if whole is None:
            continue
        values, header = whole
        complete = [found, *(one for one in older if one.is_complete)]
        folders = [one.folder for one in reversed(complete)]
        return Restored(values, found.step, header.about["beside"], folders)
    return None


class _Loading:
    """One step that is being loaded."""

    def __init__(
        self,
        directory: Path,
        found: Found,
        mould: Mapping[str, Leaf],
        timeout_secs: float,
    ):
        self._folder = directory / found.folder
        self._found = found
        self._mould = mould
        self._timeout_secs = timeout_secs

    def run(self) -> tuple[dict[str, jax.Array], Header] | None:
        """The values, or None if damage leaves too little of the step."""
        if not self._found.is_complete:
            _log(self._found.what_is_lost())
            return None
        header = self._header()
        gather(_LOADING, lambda: self._check_mould(header), self._timeout_secs)
        wanted = layout_of(self._mould)
        while self._found.is_complete:
            chosen = choose_files(self._found, header.layout, wanted)
            fetches = plan_fetches(self._found, add_copies(self._found, chosen))
            damaged = self._damaged(chosen, fetches)
            if not damaged:
                return self._read(chosen, fetches), header
            self._found = self._found.without(damaged)
        _log(self._found.what_is_lost())
        return None

    def _header(self) -> Header:
        """From a process that has a file, for those that have none."""
        saver, holders = min(self._found.holders.items())
        mine = jax.process_index() == holders[0]
        path = self._folder / file_name(saver)
        told = gather(
            _LOADING,
            lambda: open_file(path).header.as_json() if mine else None,
            self._timeout_secs,
        )
        return header_from_json(told[holders[0]])

    def _check_mould(self, header: Header) -> None:
        stored = header.layout.leaves
        match(str(self._folder), stored, dict(self._mould), Options())

    def _damaged(
        self, chosen: Sequence[Sequence[int]], fetches: Sequence[Sequence[Fetch]]
    ) -> list[tuple[int, int]]:
        """Of the files to be read or sent: holder and saver of each bad one."""
        rank = jax.process_index()
        mine = {p for p in chosen[rank] if rank in self._found.holders[p]}
        sent = [f.saver for one in fetches for f in one if f.source == rank]
        told = gather(
            _LOADING,
            lambda: self._verify(sorted(mine.union(sent))),
            self._timeout_secs,
        )
        return [(holder, p) for holder, savers in enumerate(told) for p in savers]

    def _verify(self, savers: Sequence[int]) -> list[int]:
        damaged = []
        for saver in savers:
            try:
                open_file(self._folder / file_name(saver)).check()
            except DamagedCheckpointError as error:
                _log(f"{error} The copy of another process is taken if there is one.")
                damaged.append(saver)
        return damaged

    def _read(
        self, chosen: Sequence[Sequence[int]], fetches: Sequence[Sequence[Fetch]]
    ) -> dict[str, jax.Array]:
        for one in fetches:
            self._fetch(one)
        arrays: dict[str, jax.Array] = {}

        def assemble() -> None:
            names = [self._folder / file_name(p) for p in chosen[jax.process_index()]]
            arrays.update(_assemble(names, self._mould))

        gather(_LOADING, assemble, self._timeout_secs)
        return arrays

    def _fetch(self, fetches: Sequence[Fetch]) -> None:
        """One round; who gets a file keeps it, so it has its copy again."""
        rank = jax.process_index()
        sent = [f.saver for f in fetches if f.source == rank]
        got = [f for f in fetches if f.destination == rank]
        content = [_content(self._folder / file_name(saver)) for saver in sent]
        told = gather(
            _LOADING, lambda: len(content[0]) if content else 0, self._timeout_secs
        )
        received: list[Bytes | None] = []

        def transfer() -> None:
            pairs = [fetch.pair for fetch in fetches]
            mine = content[0] if content else None
            received.append(
                send(pairs, mine, dict(enumerate(told)), self._timeout_secs)
            )
            if got and received[0] is not None:
                self._keep(got[0], received[0])

        gather(_LOADING, transfer, self._timeout_secs)

    def _keep(self, fetch: Fetch, content: Bytes) -> None:
        path = self._folder / file_name(fetch.saver)
        parse(f"{path} from process {fetch.source}", content).check()
        self._folder.mkdir(parents=True, exist_ok=True)
        # Processes with one directory may have been sent the same.
        part = path.with_suffix(f".{jax.process_index()}.part")
        with part.open("wb") as file:
            file.write(content.data)
        part.rename(path)
        _log(
            f"'{path}' was restored from process {fetch.source}: "
            f"{len(content):,} bytes, verified."
        )


def _inventory(directory: Path) -> dict[str, Any]:
    """What lies here: by folder the savers of its files and what their header says."""
    inventory: dict[str, Any] = {}
    for path in sorted(directory.glob(f"*/*{_SUFFIX}")):
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
                "savers": [],
                "twins": header.layout.twins(len(about["hosts"])),
                "cliques": about["cliques"],
                "hosts": about["hosts"],
            },
        )
        entry["savers"].append(header.process)
    return inventory


def _content(path: Path) -> Bytes:
    return np.memmap(path, np.uint8, "r")


def _assemble(paths: Sequence[Path], mould: Mapping[str, Leaf]) -> dict[str, jax.Array]:
    """Each leaf of the mould, each device its part, from the shards in some files."""
    shards: dict[str, list] = {name: [] for name in mould}
    for path in paths:
        for (name, region), data in open_file(path).read().items():
            shards[name].append((region, data))
    return {name: _fill(leaf, shards[name]) for name, leaf in mould.items()}


def _fill(leaf: Leaf, shards: Sequence[tuple[Any, np.ndarray]]) -> jax.Array:
    shape, logical = tuple(leaf.value.shape), tuple(leaf.shape)

    def part(index: Any) -> np.ndarray:
        bounds = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
        # Of its own memory, as jax may take it over; zeros behind the logical end.
        filled = np.zeros([stop - start for start, stop in bounds], leaf.value.dtype)
        wanted = region_of(index, shape, logical)
        for region, data in shards:
            common = overlap(region, wanted)
            if common is not None:
                corner = [start for start, _ in bounds]
                filled[_within(common, corner)] = data[
                    _within(common, [start for start, _ in region])
                ]
        return filled

    return jax.make_array_from_callback(shape, leaf.value.sharding, part)


def _within(region: Any, corner: Sequence[int]) -> tuple[slice, ...]:
    """Indices of a region in an array that begins at a corner."""
    return tuple(
        slice(start - at, stop - at)
        for (start, stop), at in zip(region, corner, strict=True)
    )


def _log(message: str) -> None:
    logging.getLogger("fsdp_jax").warning("%s", message)
