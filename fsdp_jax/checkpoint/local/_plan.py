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

from fsdp_jax._box import Box, overlap
from fsdp_jax.checkpoint.local._layout import Layout
from fsdp_jax.checkpoint.local._replication import Pair, ReplicationGroups

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
class LocalStep:
    """Files of one save on all hosts.

    Attributes:
      folder: Folder name, the same in all directories.
      duplicates: First process that saved the same shards, for each process that saved.
      replication_groups: Replication groups of the save.
      hosts: Host names of the processes that saved, in rank order.
      absent: Processes that saved and whose directories are not those of this job.
      owners: Present processes that have the file, by the process that saved it.
    """

    folder: str
    duplicates: tuple[int, ...]
    replication_groups: ReplicationGroups
    hosts: tuple[str, ...]
    absent: tuple[int, ...]
    owners: dict[int, tuple[int, ...]]

    @property
    def step(self) -> int:
        """Step number."""
        step = step_of(self.folder)
        assert step is not None
        return step

    @property
    def lost(self) -> list[int]:
        """Processes of whose shards neither a copy nor a duplicate is left."""
        left = {
            duplicate
            for writer, duplicate in enumerate(self.duplicates)
            if writer in self.owners
        }
        return [
            writer
            for writer, duplicate in enumerate(self.duplicates)
            if duplicate not in left
        ]

    @property
    def is_complete(self) -> bool:
        """Whether the step can be loaded."""
        return not self.lost

    @property
    def is_elsewhere(self) -> bool:
        """Whether it cannot be loaded, and a start with other directories might."""
        return bool(self.lost and self.absent)

    def without(self, damaged: Sequence[tuple[int, int]]) -> LocalStep:
        """Returns the same without damaged files, given as `(owner, writer)` pairs."""
        owners = {
            writer: tuple(p for p in owners if (p, writer) not in damaged)
            for writer, owners in self.owners.items()
        }
        left = {writer: processes for writer, processes in owners.items() if processes}
        return dataclasses.replace(self, owners=left)

    def what_is_lost(self) -> str:
        """Formats the lost shards and the processes that kept them."""
        by_group = {p: group for group in self.replication_groups for p in group}
        said = [
            f"those of process {writer}, kept by "
            + " and ".join(f"{p} ({self.hosts[p]})" for p in by_group[writer])
            for writer in self.lost
        ]
        count = len(self.duplicates)
        return (
            f"Local step {self.step} is not complete: of {count} processes' shards no "
            f"copy is {'here' if self.absent else 'left'} of {'; '.join(said)}."
        ) + self._who_would_use_it() * bool(self.absent)

    def _who_would_use_it(self) -> str:
        hosts = ", ".join(f"{p} ({self.hosts[p]})" for p in self.absent)
        return (
            f" It was saved by {len(self.duplicates)} processes, and the directories "
            f"of {hosts} are not in this job: a start with them would use it. "
            f"'{self.folder}' is kept until a newer local step is complete."
        )


def find(
    inventories: Sequence[Mapping[str, Mapping[str, Any]]],
    places: Sequence[str] = (),
) -> list[LocalStep]:
    """Returns every save with at least one file left, newest first.

    Args:
      inventories: Inventory of each process: writers of its files, with duplicates,
        replication_groups and hosts of their headers, by folder.
      places: Directory of each present process.
    """
    folders = {folder for inventory in inventories for folder in inventory}
    found = [_found(folder, inventories, places) for folder in folders]
    return sorted(found, key=lambda one: (one.step, one.folder), reverse=True)


def _found(
    folder: str,
    inventories: Sequence[Mapping[str, Mapping[str, Any]]],
    places: Sequence[str],
) -> LocalStep:
    owners: dict[int, tuple[int, ...]] = {}
    about: Mapping[str, Any] = {}
    for process, inventory in enumerate(inventories):
        if folder in inventory:
            # Equal in all headers of a save.
            about = inventory[folder]
            for writer in about["writers"]:
                owners[writer] = (*owners.get(writer, ()), process)
    return LocalStep(
        folder,
        tuple(about["duplicates"]),
        tuple(tuple(group) for group in about["replication_groups"]),
        tuple(about["hosts"]),
        tuple(p for p, place in enumerate(about["places"]) if place not in places),
        owners,
    )


def choose_files(found: LocalStep, saved: Layout, wanted: Layout) -> list[list[int]]:
    """Returns the writers whose files each present process reads.

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
            (split, box)
            for split, target in splits
            for part in wanted.tables[target][process]
            for box in _distinct(saved, split)
            if overlap(box, part) is not None
        }
        order = sorted(
            found.owners,
            key=lambda p: (process not in found.owners[p], p != process, p),
        )
        chosen.append(_cover(needed, order, saved))
    return chosen


def _distinct(saved: Layout, split: int) -> set[Box]:
    return {box for boxes in saved.tables[split] for box in boxes}


def _cover(
    needed: set[tuple[int, Box]], order: Sequence[int], saved: Layout
) -> list[int]:
    """Returns the first writers in `order` that together have all needed boxes."""
    chosen = []
    for writer in order:
        has = {(s, r) for s, r in needed if r in saved.tables[s][writer]}
        if has:
            chosen.append(writer)
            needed = needed - has
    assert not needed, "a complete save lacks a part"
    return sorted(chosen)


def add_copies(found: LocalStep, chosen: Sequence[Sequence[int]]) -> list[list[int]]:
    """Adds the writers whose files each process keeps as copies.

    So a host that returns empty is a peer again at once. If the number of processes has
    changed, the next save makes the copies instead.
    """
    if len(chosen) != len(found.duplicates):
        return [list(writers) for writers in chosen]
    replication_groups = {
        process: group for group in found.replication_groups for process in group
    }
    return [
        sorted(
            {*writers, *(p for p in replication_groups[process] if p in found.owners)}
        )
        for process, writers in enumerate(chosen)
    ]


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Copy of one file from a process to another."""

    writer: int
    source: int
    destination: int

    @property
    def pair(self) -> Pair:
        """Source and destination process."""
        return self.source, self.destination


def plan_fetches(
    found: LocalStep, chosen: Sequence[Sequence[int]]
) -> list[list[Fetch]]:
    """Returns the copies in rounds, with at most one per source and per destination.

    Args:
      found: Complete save.
      chosen: Writers whose files each process needs.
    """
    load: Counter[int] = Counter()
    rounds: list[list[Fetch]] = []
    for process, writers in enumerate(chosen):
        for writer in writers:
            owners = found.owners[writer]
            if process in owners:
                continue
            source = min(owners, key=lambda p: (load[p], p))
            load[source] += 1
            _place(Fetch(writer, source, process), rounds)
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
