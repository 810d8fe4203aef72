"""Replication groups: processes that keep copies of each other's shards."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

Cliques = tuple[tuple[int, ...], ...]
Pair = tuple[int, int]  # (source, destination) processes


def make_cliques(num_processes: int, *, size: int = 2, jump: int = 1) -> Cliques:
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
            f"{num_processes} process(es) do not make cliques of size={size} with "
            f"jump={jump}: size * jump = {block} must divide their number. Choose "
            "others, or name the cliques: [[0, 1], [2, 3, 4]]."
        )
    return tuple(
        tuple(range(start, start + block, jump))
        for first in range(0, num_processes, block)
        for start in range(first, first + jump)
    )


def check_cliques(cliques: Sequence[Sequence[int]], num_processes: int) -> Cliques:
    """Returns the groups as tuples if each process is in exactly one.

    Raises:
      ValueError: If not; lists the processes that are in none or in several, and those
        that do not exist.
    """
    members = Counter(process for clique in cliques for process in clique)
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
            f"cliques={[list(clique) for clique in cliques]}: each of {num_processes} "
            f"process(es) must be in one; but {'; '.join(wrong)}."
        )
    return tuple(tuple(clique) for clique in cliques)


def check_apart(cliques: Cliques, places: Sequence[str]) -> None:
    """Raises a `ValueError` if a copy would be in the same directory as its original.

    Args:
      cliques: Replication groups.
      places: Directory of each process, from `place_of`.
    """
    together = [
        clique for clique in cliques if len({places[p] for p in clique}) < len(clique)
    ]
    if together:
        raise ValueError(
            "Processes of one clique have one directory, and would lose it together: "
            + "; ".join(", ".join(map(str, clique)) for clique in together)
            + ". Choose cliques across hosts, e.g. make_cliques(..., jump=<processes "
            "of a host>), or size=1 for no copies."
        )


def place_of(directory: Path) -> str:
    """Returns an id of machine and directory, equal for all paths to it."""
    status = directory.stat()
    return f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}"


def rounds(cliques: Cliques) -> list[tuple[Pair, ...]]:
    """Returns rounds of `(source, destination)` pairs, one destination per source.

    After the last round each member of a group has the shards of all its members.
    """
    longest = max(map(len, cliques))
    return [
        tuple(
            (process, clique[(place + shift) % len(clique)])
            for clique in cliques
            if shift < len(clique)
            for place, process in enumerate(clique)
        )
        for shift in range(1, longest)
    ]
