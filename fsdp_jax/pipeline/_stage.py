"""What a stage of a pipeline does in a turn: a chunk of layers, and maybe the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fsdp_jax._tree import PyTree
from fsdp_jax.sharding._stages import Schedule, Stages, Turn
from fsdp_jax.step._aux_outputs import AuxFormat
from fsdp_jax.step._layer_stack import Role
from fsdp_jax.step._shard import Shard
from fsdp_jax.step._split_loss import CutLoss

Grads = list[Array | None]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one device of a pipeline runs.

    Attributes:
      cut: The loss of a microbatch.
      schedule: Who has a turn when.
      shards: Of all parameters; of the stack this stage's layers.
      rows: This rank's rows, `[microbatches, ...]`.
      key: From which each microbatch has its own.
      aux_format: Sorts what the loss returns besides.
    """

    cut: CutLoss
    schedule: Schedule
    shards: Sequence[Shard]
    rows: PyTree
    key: Any
    aux_format: AuxFormat

    @property
    def index(self) -> Array:
        """Of this stage."""
        return lax.axis_index("pp")

    def sinks(self, chunk: Any) -> Grads:
        """Where the gradients of a turn leave: of the stack, its chunk's."""
        sinks = [shard.sink for shard in self.shards]
        return [
            self.part(sink, chunk) if shard.row.is_staged else sink
            for shard, sink in zip(self.shards, sinks, strict=True)
        ]

    def part(self, x: Any, chunk: Any) -> Any:
        """The chunk's layers of what is stacked over this stage's."""
        return part_of(self.schedule.stages, x, chunk)

    def is_last(self, chunk: Any) -> Any:
        """Whether a chunk of this stage is the last of the stack."""
        return self._number(chunk) == self.schedule.stages.num_chunks - 1

    def message(self, state: PyTree) -> PyTree:
        """The shapes of what goes from stage to stage, `(carry, ys)`, flat.

        The `y`s of all layers, of which each stage adds its own.
        """
        return jax.eval_shape(self._empty_message, state)

    def out_shapes(self, message: PyTree, state: PyTree) -> Any:
        """Of what a microbatch's loss returns, `(total, count, aux)`."""

        def run(message, state):
            sinks, first = self.sinks(0), Turn(True, 0, 0, 0)
            _, total, (count, aux, _) = self.with_loss(sinks, message, first, state)
            return total, count, aux

        return jax.eval_shape(run, message, state)

    def forward(self, sinks: Grads, message: PyTree, turn: Turn, state: PyTree):
        """One chunk: what goes on to the next stage."""
        return self._chunk(self._leaves(sinks, turn, state), message, turn)

    def with_loss(self, sinks: Grads, message: PyTree, turn: Turn, state: PyTree):
        """The same, with the loss, which is zero unless the chunk is the last.

        Returns:
          The message, the loss, and `(count, aux, state)`.
        """
        leaves = self._leaves(sinks, turn, state)
        message = self._chunk(leaves, message, turn)

        def behind(message):
            carry, ys = message
            ys = [y[: self.schedule.stages.num_layers] for y in ys]
            total, (count, aux, state) = self.cut.behind(leaves, [*carry, *ys])
            return total, (count, self.aux_format.take_apart(aux), state)

        def nothing(message):
            return jax.tree.map(zeros_of, jax.eval_shape(behind, message))

        total, others = lax.cond(self.is_last(turn.chunk), behind, nothing, message)
        return message, total, others

    def _number(self, chunk: Any) -> Any:
        """Of a chunk in the stack."""
        return chunk * self.schedule.stages.num_stages + self.index

    def _leaves(self, sinks: Grads, turn: Turn, state: PyTree) -> list[Array]:
        """Everything that the loss of a microbatch is a function of."""
        shards = [
            dataclasses.replace(
                shard, value=self.part(shard.value, turn.chunk), sink=sink
            )
            if shard.row.is_staged
            else dataclasses.replace(shard, sink=sink)
            for shard, sink in zip(self.shards, sinks, strict=True)
        ]
        rows = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, turn.microbatch, keepdims=False),
            self.rows,
        )
        key = jax.random.fold_in(self.key, turn.microbatch)
        return jax.tree.leaves((shards, state, rows, key))

    def _empty_message(self, state: PyTree) -> PyTree:
        first = Turn(True, 0, 0, 0)
        leaves = self._leaves(self.sinks(0), first, state)
        carry = list(self.cut.carry(leaves))
        stages = self.schedule.stages
        num_layers = stages.num_layers + stages.padding
        ys = self.cut.stack.shapes[len(carry) :]
        return carry, [jnp.zeros((num_layers, *y.shape[1:]), y.dtype) for y in ys]

    def _chunk(self, leaves: list[Array], message: PyTree, turn: Turn) -> PyTree:
        """Runs the layers of a chunk; the first chunk makes its input itself."""
        stages, number = self.schedule.stages, self._number(turn.chunk)
        carry, ys = message
        carry = lax.cond(
            number == 0, lambda: list(self.cut.carry(leaves)), lambda: list(carry)
        )
        layers = number * stages.chunk_size + jnp.arange(stages.chunk_size)
        is_real = layers < stages.num_layers if stages.padding else None
        operands = self._operands(leaves, carry, layers)
        carry, new = self.cut.stack.run_chunk(operands, is_real)
        ys = [
            lax.dynamic_update_slice_in_dim(y, own, layers[0], 0)
            for y, own in zip(ys, jax.tree.leaves(new), strict=True)
        ]
        return jax.tree.leaves(carry), ys

    def _operands(self, leaves: list[Array], carry: list[Array], layers: Array):
        last = self.schedule.stages.num_layers - 1
        shards = iter([leaves[place] for place in self.cut.shards])
        beside, carried = iter(self.cut.beside(leaves)), iter(carry)
        for role in self.cut.stack.roles:
            if role == Role.SHARDS:
                yield next(shards)
            elif role == Role.CARRY:
                yield next(carried)
            elif role == Role.CONSTS:
                yield next(beside)
            else:  # Behind the last layer its own once more, which is not used.
                yield jnp.asarray(next(beside))[jnp.minimum(layers, last)]


def zeros_of(shape: Any) -> Array:
    """Zeros of a shape; for a key, any."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape.shape)
    return jnp.zeros(shape.shape, shape.dtype)


def part_of(stages: Stages, x: Any, chunk: Any) -> Any:
    """The layers of a chunk, of what is stacked over those of its stage."""
    if stages.num_virtual == 1:
        return x
    size = stages.chunk_size
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, chunk * size, size), x)
