"""Arithmetic of pipeline stages: layers of each, turns by tick. No arrays."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Stages:
    """A stack of layers, split over stages in chunks.

    Chunk `c` of stage `s` is chunk `c * num_stages + s` of the stack. If chunks of one
    size do not add up to the stack, the last ones are short.

    Example: 8 layers, 2 stages, 2 virtual stages:

        chunk of the stack   0     1     2     3
        layers               0 1   2 3   4 5   6 7
        stage, its chunk     0, 0  1, 0  0, 1  1, 1

    Attributes:
      num_layers: Number of layers of the stack.
      num_stages: Number of devices along `pp`.
      num_virtual: Number of chunks a stage.
    """

    num_layers: int
    num_stages: int
    num_virtual: int

    @property
    def num_chunks(self) -> int:
        """Number of chunks of all stages together."""
        return self.num_stages * self.num_virtual

    @property
    def chunk_size(self) -> int:
        """Number of layers of a full chunk."""
        return -(-self.num_layers // self.num_chunks)

    @property
    def padding(self) -> int:
        """Number of layers of zeros after the last one, which no stage runs."""
        return self.num_chunks * self.chunk_size - self.num_layers

    @property
    def layers_of_stages(self) -> tuple[int, ...]:
        """Number of layers that each stage runs."""
        sizes = [
            min(self.chunk_size, max(0, self.num_layers - g * self.chunk_size))
            for g in range(self.num_chunks)
        ]
        return tuple(sum(sizes[s :: self.num_stages]) for s in range(self.num_stages))


@dataclasses.dataclass(frozen=True)
class Turn:
    """Turn of a stage in one direction during a tick; fields are integers or traced.

    Attributes:
      is_due: True if the stage has a turn in this tick.
      microbatch: Index of the microbatch.
      chunk: Index of the chunk among the stage's chunks.
      slot: Index of the buffer that stores the chunk's input from forward to backward.
    """

    is_due: Any
    microbatch: Any
    chunk: Any
    slot: Any


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Turns of each stage with each microbatch.

    In a tick a stage runs at most one chunk forward and one backward, and its neighbour
    has the result in the next tick. Microbatches run in rounds of `num_stages`, each
    round through all chunks. Backward mirrors that, and starts in the tick in which the
    first microbatch completes its forward.

    Attributes:
      stages: Split of the stack over stages.
      num_microbatches: Number of microbatches in a step.
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
        """Ticks until all microbatches have completed forward."""
        return self.num_turns + self.stages.num_stages - 1

    @property
    def ticks(self) -> int:
        """Ticks of a step that interleaves both directions."""
        return self.forward_ticks + self.stages.num_chunks - 1

    @property
    def num_slots(self) -> int:
        """Maximum number of inputs that a stage stores, of all its chunks together."""
        # The first chunk of the stack waits longest for its backward, which runs
        # 2 * (num_chunks - 1) ticks later; its slot is in use in both of these ticks.
        return min(2 * self.stages.num_chunks - 1, self.num_turns)

    @property
    def bubble(self) -> float:
        """Share of a step, in either direction, in which a stage has no turn."""
        turns = self.num_microbatches * self.stages.num_virtual
        return 1 - turns / self.forward_ticks

    def forward(self, tick: Any, stage: Any) -> Turn:
        """Returns the forward turn of `stage`."""
        # Stage s starts s ticks after the first one.
        turn = tick - stage
        return self._turn(turn, (turn // self.stages.num_stages) % self._virtual)

    def backward(self, tick: Any, stage: Any) -> Turn:
        """Returns the backward turn of `stage`."""
        # Backward starts on the last stage, in the tick in which the first microbatch
        # reaches the last chunk. Chunks take turns in reverse order.
        turn = tick - self.stages.num_chunks + 1 - (self.stages.num_stages - 1 - stage)
        forward = (turn // self.stages.num_stages) % self._virtual
        return self._turn(turn, self._virtual - 1 - forward)

    def last_tick(self, microbatch: int) -> int:
        """Returns the tick of a microbatch's last chunk on the last stage."""
        stages = self.stages.num_stages
        first = microbatch // stages * self.stages.num_chunks + microbatch % stages
        return first + self.stages.num_chunks - 1

    @property
    def _virtual(self) -> int:
        return self.stages.num_virtual

    def _turn(self, turn: Any, chunk: Any) -> Turn:
        # A round runs `num_stages` microbatches through all chunks, chunk by chunk.
        # With 2 stages of 2 chunks:
        #
        #     turn         0    1    2    3    4    5    ...
        #     microbatch   0    1    0    1    2    3
        #     chunk        0    0    1    1    0    0
        #
        # A stage thus has a turn with the next chunk just when its neighbour has sent
        # the microbatch once around the ring. In the last round, microbatches that do
        # not exist are not due.
        stages, chunks = self.stages.num_stages, self.stages.num_chunks
        start = turn // chunks  # Index of the round.
        microbatch = start * stages + turn % stages
        is_due = (turn >= 0) & (turn < self.num_turns)
        is_due = is_due & (microbatch < self.num_microbatches)
        # The forward turn of this microbatch and chunk, so that backward finds the slot
        # that forward wrote. num_slots consecutive turns have different slots.
        slot = (start * chunks + chunk * stages + turn % stages) % self.num_slots
        return Turn(is_due, microbatch, chunk, slot)
