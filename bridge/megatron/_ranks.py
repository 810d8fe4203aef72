"""Model-parallel ranks, and the directories that legacy checkpoints give them."""

import re
from typing import NamedTuple

RANK_DIRECTORY = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")


class Rank(NamedTuple):
    """A model-parallel rank: of tensors, the pipeline, experts."""

    tp: int
    pp: int
    ep: int


class ParallelSizes(NamedTuple):
    """How many ranks there are of each kind."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def ranks(self) -> list[Rank]:
        """Returns all ranks."""
        return [
            Rank(t, p, e)
            for p in range(self.pp)
            for e in range(self.ep)
            for t in range(self.tp)
        ]

    def directory(self, rank: Rank) -> str:
        """Names a rank's directory; the second field is EP where there is no PP."""
        name = f"mp_rank_{rank.tp:02d}"
        name += f"_{rank.pp:03d}" if self.pp > 1 else ""
        return name + (f"_{rank.ep:03d}" if self.ep > 1 else "")
