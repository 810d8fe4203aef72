"""Plans which files of a local step each process reads and copies.

Every function is deterministic in values known to all processes, which exchange their
inventories once: no process waits for a decision of another.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_jax.checkpoint.local._layout import Layout, Region, overlap
from fsdp_jax.checkpoint.local._replication import Cliques, Pair

# Folder name: step and random id of the attempt.
_FOLDER = re.compile(r"(\d+)-[0-9a-f]+")


def folder_name(step: int, attempt: str) -> str:
    """Returns the folder name of a save."""
    return f"{step}-{attempt}"


def step_of(folder: str) -> int | None:
    """Returns the step of a folder; None if it is not a folder of a save."""
    match = _FOLDER.fullmatch(folder)
    return None if match is None else int(match[1])


@dataclasses.dataclass(frozen=True)
class Found:
    """Files of one save on all hosts.

    Attributes:
      folder: Folder name, the same in all directories.
      twins: First process that saved the same shards, for each process that saved.
      cliques: Replication groups of the save.
      hosts: Host names of the processes that saved, in rank order.
      holders: Present processes that have the file, by the process that saved it.
    """

    folder: str
    twins: tuple[int, ...]
    cliques: Cliques
    hosts: tuple[str, ...]
    holders: dict[int, tuple[int, ...]]

    @property
    def step(self) -> int:
        """Step number."""
        step = step_of(self.folder)
        assert step is not None
        return step

    @property
    def lost(self) -> list[int]:
        """Processes of whose shards neither a copy nor a duplicate is left."""
        left = {twin for saver, twin in enumerate(self.twins) if saver in self.holders}
        return [saver for saver, twin in enumerate(self.twins) if twin not in left]

    @property
    def is_complete(self) -> bool:
        """Whether the step can be loaded."""
        return not self.lost

    def without(self, damaged: Sequence[tuple[int, int]]) -> Found:
        """Returns the same without damaged files, given as `(owner, saver)` pairs."""
        holders = {
            saver: tuple(p for p in holders if (p, saver) not in damaged)
            for saver, holders in self.holders.items()
        }
        left = {saver: processes for saver, processes in holders.items() if processes}
        return dataclasses.replace(self, holders=left)

    def what_is_lost(self) -> str:
        """Formats the lost shards and the processes that kept them."""
        by_clique = {p: clique for clique in self.cliques for p in clique}
        said = [
            f"those of process {saver}, kept by "
            + " and ".join(f"{p} ({self.hosts[p]})" for p in by_clique[saver])
            for saver in self.lost
        ]
        return (
            f"Local step {self.step} is not complete: of {len(self.twins)} processes' "
            f"shards no copy is left of {'; '.join(said)}."
        )


def find(inventories: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[Found]:
    """Returns every save with at least one file left, newest first.

    Args:
      inventories: Inventory of each process: savers of its files, with twins, cliques
        and hosts of their headers, by folder.
    """
    folders = {folder for inventory in inventories for folder in inventory}
    found = [_found(folder, inventories) for folder in folders]
    return sorted(found, key=lambda one: (one.step, one.folder), reverse=True)


def _found(
    folder: str, inventories: Sequence[Mapping[str, Mapping[str, Any]]]
) -> Found:
    holders: dict[int, tuple[int, ...]] = {}
    about: Mapping[str, Any] = {}
    for process, inventory in enumerate(inventories):
        if folder in inventory:
            # Equal in all headers of a save.
            about = inventory[folder]
            for saver in about["savers"]:
                holders[saver] = (*holders.get(saver, ()), process)
    return Found(
        folder,
        tuple(about["twins"]),
        tuple(tuple(clique) for clique in about["cliques"]),
        tuple(about["hosts"]),
        holders,
    )


def choose_files(found: Found, saved: Layout, wanted: Layout) -> list[list[int]]:
    """Returns the savers whose files each present process reads.

    A process reads its own file if that suffices. If the mesh or the number of
    processes has changed, it reads the files with the parts it needs, local ones first.

    Args:
      found: Complete save.
      saved: Layout in which the leaves were saved.
      wanted: Layout in which they are needed.
    """
    num_processes = len(wanted.tables[0]) if wanted.tables else 0
    splits = {(saved.splits[name], wanted.splits[name]) for name in wanted.leaves}
    chosen = []
    for process in range(num_processes):
        needed = {
            (split, region)
            for split, target in splits
            for part in wanted.tables[target][process]
            for region in _distinct(saved, split)
            if overlap(region, part) is not None
        }
        order = sorted(
            found.holders,
            key=lambda p: (process not in found.holders[p], p != process, p),
        )
        chosen.append(_cover(needed, order, saved))
    return chosen


def _distinct(saved: Layout, split: int) -> set[Region]:
    return {region for regions in saved.tables[split] for region in regions}


def _cover(
    needed: set[tuple[int, Region]], order: Sequence[int], saved: Layout
) -> list[int]:
    """Returns the first savers in `order` that together have all needed regions."""
    chosen = []
    for saver in order:
        has = {(s, r) for s, r in needed if r in saved.tables[s][saver]}
        if has:
            chosen.append(saver)
            needed = needed - has
    assert not needed, "a complete save lacks a part"
    return sorted(chosen)


def add_copies(found: Found, chosen: Sequence[Sequence[int]]) -> list[list[int]]:
    """Adds the savers whose files each process keeps as copies.

    So a host that returns empty is a peer again at once. If the number of processes has
    changed, the next save makes the copies instead.
    """
    if len(chosen) != len(found.twins):
        return [list(savers) for savers in chosen]
    cliques = {process: clique for clique in found.cliques for process in clique}
    return [
        sorted({*savers, *(p for p in cliques[process] if p in found.holders)})
        for process, savers in enumerate(chosen)
    ]


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Copy of one file from a process to another."""

    saver: int
    source: int
    destination: int

    @property
    def pair(self) -> Pair:
        """Source and destination process."""
        return self.source, self.destination


def plan_fetches(found: Found, chosen: Sequence[Sequence[int]]) -> list[list[Fetch]]:
    """Returns the copies in rounds, with at most one per source and per destination.

    Args:
      found: Complete save.
      chosen: Savers whose files each process needs.
    """
    load: Counter[int] = Counter()
    rounds: list[list[Fetch]] = []
    for process, savers in enumerate(chosen):
        for saver in savers:
            holders = found.holders[saver]
            if process in holders:
                continue
            source = min(holders, key=lambda p: (load[p], p))
            load[source] += 1
            _place(Fetch(saver, source, process), rounds)
    return rounds


def _place(fetch: Fetch, rounds: list[list[Fetch]]) -> None:
    for one in rounds:
        if all(
            fetch.source != other.source and fetch.destination != other.destination
            for other in one
        ):
            one.append(fetch)
            return
    rounds.append([fetch])
