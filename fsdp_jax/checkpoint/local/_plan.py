"""What all processes together make of the files that each of them has.

Every function is given what all were told and gives all the same answer: who has what
is exchanged once, and no one waits for a decision of another.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_jax.checkpoint.local._layout import Layout, Region, overlap
from fsdp_jax.checkpoint.local._replication import Cliques, Pair

# Of a folder: which step, and which attempt at it.
_FOLDER = re.compile(r"(\d+)-[0-9a-f]+")


def folder_name(step: int, attempt: str) -> str:
    """Of the folder of a save."""
    return f"{step}-{attempt}"


def step_of(folder: str) -> int | None:
    """The step of a folder; None if it is none of ours."""
    match = _FOLDER.fullmatch(folder)
    return None if match is None else int(match[1])


@dataclasses.dataclass(frozen=True)
class Found:
    """The files of one save, wherever they are.

    Attributes:
      folder: Its name, the same in all directories.
      twins: For each process that saved, the first that saved the same as it.
      cliques: Who kept copies of whose shards.
      hosts: Names of the machines of those that saved, in order.
      holders: By process that saved, the processes of now that have its file.
    """

    folder: str
    twins: tuple[int, ...]
    cliques: Cliques
    hosts: tuple[str, ...]
    holders: dict[int, tuple[int, ...]]

    @property
    def step(self) -> int:
        """The step that was saved."""
        step = step_of(self.folder)
        assert step is not None
        return step

    @property
    def lost(self) -> list[int]:
        """The processes of whose shards no copy is left, nor a twin's."""
        left = {twin for saver, twin in enumerate(self.twins) if saver in self.holders}
        return [saver for saver, twin in enumerate(self.twins) if twin not in left]

    @property
    def is_complete(self) -> bool:
        """Whether it can be loaded."""
        return not self.lost

    def without(self, damaged: Sequence[tuple[int, int]]) -> Found:
        """The same but for files that are damaged: pairs of holder and saver."""
        holders = {
            saver: tuple(p for p in holders if (p, saver) not in damaged)
            for saver, holders in self.holders.items()
        }
        left = {saver: processes for saver, processes in holders.items() if processes}
        return dataclasses.replace(self, holders=left)

    def what_is_lost(self) -> str:
        """For messages: whose shards, and who kept them."""
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
    """Every save of which a file is left, the newest first.

    Args:
      inventories: For each process what it has: by folder the savers of its files,
        and twins, cliques and hosts as their header says.
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
    """For each process of now the savers whose files have all that it wants.

    Its own file where that will do; where the mesh or the number of processes is
    another, those that hold the parts it needs, at hand if possible.

    Args:
      found: A complete save.
      saved: How its leaves were split.
      wanted: How they are to be.
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
    """The first savers in an order that have all that is needed between them."""
    chosen = []
    for saver in order:
        has = {(s, r) for s, r in needed if r in saved.tables[s][saver]}
        if has:
            chosen.append(saver)
            needed = needed - has
    assert not needed, "a complete save lacks a part"
    return sorted(chosen)


def add_copies(found: Found, chosen: Sequence[Sequence[int]]) -> list[list[int]]:
    """The same, and the savers of whose files each process is to keep a copy.

    So that a host that comes back empty is a peer again, at once. Where another number
    of processes saved, the next save makes copies.
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
    """A file that a process sends to another."""

    saver: int
    source: int
    destination: int

    @property
    def pair(self) -> Pair:
        """From where to where."""
        return self.source, self.destination


def plan_fetches(found: Found, chosen: Sequence[Sequence[int]]) -> list[list[Fetch]]:
    """Who sends what to whom, in rounds: each process to one at most, and from one.

    Args:
      found: A complete save.
      chosen: For each process the savers whose files it is to have.
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
