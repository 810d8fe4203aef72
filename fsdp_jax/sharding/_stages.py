"""Which layers a pipeline stage has, and what it does when: arithmetic, no arrays."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Stages:
    """A stack of layers, dealt out to stages in chunks.

    Chunk `c` of stage `s` is the `c * num_stages + s`-th of the stack. Where chunks of
    one size do not make the stack, the last ones are short.

    Attributes:
      num_layers: Of the stack.
      num_stages: Devices along `pp`.
      num_virtual: Chunks a stage.
    """

    num_layers: int
    num_stages: int
    num_virtual: int

    @property
    def num_chunks(self) -> int:
        """Of all stages together."""
        return self.num_stages * self.num_virtual

    @property
    def chunk_size(self) -> int:
        """Layers of a full chunk."""
        return -(-self.num_layers // self.num_chunks)

    @property
    def padding(self) -> int:
        """Layers of zeros behind the last one, which no stage runs."""
        return self.num_chunks * self.chunk_size - self.num_layers

    @property
    def layers_of_stages(self) -> tuple[int, ...]:
        """How many layers each stage runs."""
        sizes = [
            min(self.chunk_size, max(0, self.num_layers - g * self.chunk_size))
            for g in range(self.num_chunks)
        ]
        return tuple(sum(sizes[s :: self.num_stages]) for s in range(self.num_stages))


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a stage does in one direction during a tick; numbers, or traced ones.

    Attributes:
      is_due: Whether it does anything.
      microbatch: Of which it is.
      chunk: Through which of the stage's chunks.
      slot: Where the input is kept between forward and backward.
    """

    is_due: Any
    microbatch: Any
    chunk: Any
    slot: Any


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When each stage has its turn with each microbatch.

    In a tick a stage runs at most one chunk forward and one backward, and what it made
    is with its neighbour at the next. Microbatches go through in rounds of
    `num_stages`, each round through all chunks; backward mirrors that, and starts in
    the tick in which the first microbatch is through.

    Attributes:
      stages: The stack.
      num_microbatches: In a step.
    """

    stages: Stages
    num_microbatches: int

    @property
    def num_turns(self) -> int:
        """Ticks from a stage's first turn to its last, in one direction."""
        if self.stages.num_virtual == 1:
            return self.num_microbatches
        rounds = -(-self.num_microbatches // self.stages.num_stages)
        return rounds * self.stages.num_chunks

    @property
    def forward_ticks(self) -> int:
        """Ticks until all microbatches are through forward."""
        return self.num_turns + self.stages.num_stages - 1

    @property
    def ticks(self) -> int:
        """Ticks of both directions, one microbatch backward for each forward."""
        return self.forward_ticks + self.stages.num_chunks - 1

    @property
    def num_slots(self) -> int:
        """Inputs that a stage keeps at most, of all its chunks together."""
        return min(2 * self.stages.num_chunks - 1, self.num_turns)

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage has no turn."""
        turns = self.num_microbatches * self.stages.num_virtual
        return 1 - turns / self.forward_ticks

    def forward(self, tick: Any, stage: Any) -> Turn:
        """The turn of `stage` forward."""
        turn = tick - stage
        return self._turn(turn, (turn // self.stages.num_stages) % self._virtual)

    def backward(self, tick: Any, stage: Any) -> Turn:
        """The turn of `stage` backward."""
        turn = tick - self.stages.num_chunks + 1 - (self.stages.num_stages - 1 - stage)
        forward = (turn // self.stages.num_stages) % self._virtual
        return self._turn(turn, self._virtual - 1 - forward)

    def last_tick(self, microbatch: int) -> int:
        """The tick in which the last stage runs its last chunk of a microbatch."""
        stages = self.stages.num_stages
        first = microbatch // stages * self.stages.num_chunks + microbatch % stages
        return first + self.stages.num_chunks - 1

    @property
    def _virtual(self) -> int:
        return self.stages.num_virtual

    def _turn(self, turn: Any, chunk: Any) -> Turn:
        stages, chunks = self.stages.num_stages, self.stages.num_chunks
        start = turn // chunks  # Of its round.
        microbatch = start * stages + turn % stages
        is_due = (turn >= 0) & (turn < self.num_turns)
        is_due = is_due & (microbatch < self.num_microbatches)
        slot = (start * chunks + chunk * stages + turn % stages) % self.num_slots
        return Turn(is_due, microbatch, chunk, slot)
