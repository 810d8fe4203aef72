"""Model-parallel ranks, and their directories in legacy checkpoints."""

import re
from typing import NamedTuple

RANK_DIRECTORY = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")


class Rank(NamedTuple):
    """Model-parallel rank: its tensor, pipeline and expert coordinates."""

    tp: int
    pp: int
    ep: int


class ParallelSizes(NamedTuple):
    """Numbers of tensor-, pipeline- and expert-parallel ranks."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def ranks(self) -> list[Rank]:
        """Returns all ranks, with tp innermost and pp outermost."""
        return [
            Rank(t, p, e)
            for p in range(self.pp)
            for e in range(self.ep)
            for t in range(self.tp)
        ]

    def directory(self, rank: Rank) -> str:
        """Returns a rank's directory name; without PP the second field is EP."""
        name = f"mp_rank_{rank.tp:02d}"
        name += f"_{rank.pp:03d}" if self.pp > 1 else ""
        return name + (f"_{rank.ep:03d}" if self.ep > 1 else "")
