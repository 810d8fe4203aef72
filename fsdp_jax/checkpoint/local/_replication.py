"""Replication groups: processes that keep copies of each other's shards."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ReplicationGroups = tuple[tuple[int, ...], ...]
Pair = tuple[int, int]  # (source, destination) processes


def make_replication_groups(
    num_processes: int, *, size: int = 2, jump: int = 1
) -> ReplicationGroups:
    """Returns groups of processes that keep copies of each other's shards.

    Two processes that may fail together must not be in one group: with one process per
    GPU, set `jump` to the number of processes per host. With 4 processes, `size=2`
    gives (0, 1), (2, 3); with `jump=2`, (0, 2), (1, 3).

    Args:
      num_processes: Number of processes of the job, `jax.process_count()`.
      size: Number of processes that have each shard; 1 for no copies.
      jump: Distance between consecutive members of a group.

    Raises:
      ValueError: If `size` or `jump` is below 1, or `size * jump` does not divide
        `num_processes`.

    Source: nvidia-resiliency-ext
      checkpointing/local/replication/strategies.py::CliqueReplicationStrategy
    """
    block = size * jump
    if size < 1 or jump < 1 or num_processes % block:
        raise ValueError(
            f"{num_processes} process(es) do not make replication_groups of size={size} with "
            f"jump={jump}: size * jump = {block} must divide their number. Choose "
            "others, or name the replication_groups: [[0, 1], [2, 3, 4]]."
        )
    return tuple(
        tuple(range(start, start + block, jump))
        for first in range(0, num_processes, block)
        for start in range(first, first + jump)
    )


def check_replication_groups(
    replication_groups: Sequence[Sequence[int]], num_processes: int
) -> ReplicationGroups:
    """Returns the groups as tuples if each process is in exactly one.

    Raises:
      ValueError: If not; lists the processes that are in none or in several, and those
        that do not exist.
    """
    members = Counter(process for group in replication_groups for process in group)
    wrong = [
        f"process {process} is in {members[process]}"
        for process in range(num_processes)
        if members[process] != 1
    ]
    wrong += [
        f"there is no process {process}"
        for process in sorted(members)
        if not 0 <= process < num_processes
    ]
    if wrong:
        raise ValueError(
            f"replication_groups={[list(group) for group in replication_groups]}: each of {num_processes} "
            f"process(es) must be in one; but {'; '.join(wrong)}."
        )
    return tuple(tuple(group) for group in replication_groups)


def check_apart(replication_groups: ReplicationGroups, places: Sequence[str]) -> None:
    """Raises a `ValueError` if a copy would be in the same directory as its original.

    Args:
      replication_groups: Replication groups.
      places: Directory of each process, from `place_of`.
    """
    together = [
        group
        for group in replication_groups
        if len({places[p] for p in group}) < len(group)
    ]
    if together:
        raise ValueError(
            "Processes of one group have one directory, and would lose it together: "
            + "; ".join(", ".join(map(str, group)) for group in together)
            + ". Choose replication_groups across hosts, e.g. make_replication_groups(..., jump=<processes "
            "of a host>), or size=1 for no copies."
        )


def place_of(directory: Path) -> str:
    """Returns an id of machine and directory, equal for all paths to it."""
    status = directory.stat()
    return f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}"


def rounds(replication_groups: ReplicationGroups) -> list[tuple[Pair, ...]]:
    """Returns rounds of `(source, destination)` pairs, one destination per source.

    After the last round each member of a group has the shards of all its members.
    """
    longest = max(map(len, replication_groups))
    return [
        tuple(
            (process, group[(place + shift) % len(group)])
            for group in replication_groups
            if shift < len(group)
            for place, process in enumerate(group)
        )
        for shift in range(1, longest)
    ]
