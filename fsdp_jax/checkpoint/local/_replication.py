"""Who keeps a copy of whose shards."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

Cliques = tuple[tuple[int, ...], ...]
Pair = tuple[int, int]  # from one process to another


def make_cliques(num_processes: int, *, size: int = 2, jump: int = 1) -> Cliques:
    """Groups of processes that keep copies of each other's shards.

    Two processes that fail together must not be in one clique: where each GPU has a
    process of its own, `jump` is the number of processes of a host. With 4 processes,
    `size=2` gives (0, 1), (2, 3); with `jump=2`, (0, 2), (1, 3).

    Args:
      num_processes: Of the job, `jax.process_count()`.
      size: How many have each shard; 1: no copies.
      jump: From a member of a clique to the next.

    Raises:
      ValueError: If `size * jump` does not divide `num_processes`.

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
    """The cliques, if each process is in one of them.

    Raises:
      ValueError: If not; it names those of which there are none, or too many.
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
    """Raises a `ValueError` if a copy would lie beside what it is a copy of.

    Args:
      cliques: Of processes.
      places: Of the directory of each process, as `place_of` says.
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
    """Which directory of which machine it is, by whatever path."""
    status = directory.stat()
    return f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}"


def rounds(cliques: Cliques) -> list[tuple[Pair, ...]]:
    """Who sends its shards to whom: in each round each process to at most one other.

    After the last one each member of a clique has those of all the others.
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
