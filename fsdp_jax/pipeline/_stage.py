"""Program of a pipeline stage in one turn: a chunk of layers, then maybe the loss."""

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
from fsdp_jax.step._split_loss import SplitLoss

Grads = list[Array | None]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Program of one device of a pipeline.

    Attributes:
      cut: Loss of a microbatch, split at the stack of layers.
      schedule: Turns of all stages.
      shards: Shards of all parameters; for the stack those of this stage's layers.
      rows: Batch of this rank, `[microbatches, ...]`.
      key: PRNG key from which the key of each microbatch is derived.
      aux_format: Sorter of the loss's auxiliary outputs.
      early: The model state's leaves that the stack's inputs depend on, `cut.early`,
        for each microbatch, `[microbatches, ...]`. Every stage computes these; only
        the last stage has the rest of the state. Empty until they are computed.
    """

    cut: SplitLoss
    schedule: Schedule
    shards: Sequence[Shard]
    rows: PyTree
    key: Any
    aux_format: AuxFormat
    early: Sequence[Array] = ()

    @property
    def index(self) -> Array:
        """Index of this stage along `pp`."""
        return lax.axis_index("pp")

    def with_early_state(self, state: PyTree) -> Stage:
        """Returns the stage with the state that each microbatch's stack reads.

        A stage runs a microbatch forward while others are under way, and again for
        backward: what the stack reads must not depend on the tick.

        Args:
          state: Model state before the first microbatch.
        """
        if not self.cut.early:
            return self

        def advance(early: Sequence[Array], microbatch: Array):
            turn = Turn(True, microbatch, 0, 0)
            now = self._with_early(state, early)
            leaves = self._leaves(self.grad_buffers(0), turn, now)
            return self.cut.update(leaves), early

        leaves = jax.tree.leaves(state)
        microbatches = jnp.arange(self.schedule.num_microbatches)
        start = [leaves[i] for i in self.cut.early]
        _, early = lax.scan(advance, start, microbatches)
        return dataclasses.replace(self, early=early)

    def grad_buffers(self, chunk: Any) -> Grads:
        """Gradient buffers of one turn: for the stack, the layers of its chunk."""
        grad_buffers = [shard.grad_buffer for shard in self.shards]
        return [
            self.part(grad_buffer, chunk) if shard.param.is_staged else grad_buffer
            for shard, grad_buffer in zip(self.shards, grad_buffers, strict=True)
        ]

    def part(self, x: Any, chunk: Any) -> Any:
        """Returns a chunk's layers of arrays stacked over this stage's layers."""
        return part_of(self.schedule.stages, x, chunk)

    def is_last(self, chunk: Any) -> Any:
        """Returns whether a chunk of this stage is the last chunk of the stack."""
        return self._number(chunk) == self.schedule.stages.num_chunks - 1

    def message(self, state: PyTree) -> PyTree:
        """Returns the shapes of the message between stages, `(carry, ys)`, both flat.

        `ys` has the outputs of all layers of the stack; each stage writes those of its
        own.
        """
        return jax.eval_shape(self._empty_message, state)

    def out_shapes(self, message: PyTree, state: PyTree) -> Any:
        """Returns the shapes of `(total, count, aux)` of one microbatch."""

        def run(message, state):
            grad_buffers, first = self.grad_buffers(0), Turn(True, 0, 0, 0)
            _, total, (count, aux, _) = self.with_loss(
                grad_buffers, message, first, state
            )
            return total, count, aux

        return jax.eval_shape(run, message, state)

    def forward(self, grad_buffers: Grads, message: PyTree, turn: Turn, state: PyTree):
        """Runs one chunk and returns the message to the next stage."""
        return self._chunk(self._leaves(grad_buffers, turn, state), message, turn)

    def with_loss(
        self, grad_buffers: Grads, message: PyTree, turn: Turn, state: PyTree
    ):
        """Runs one chunk and the loss, which is zero unless the chunk is the last one.

        Returns:
          The message to the next stage, the loss, and `(count, aux, state)`.
        """
        leaves = self._leaves(grad_buffers, turn, state)
        message = self._chunk(leaves, message, turn)

        def behind(message):
            carry, ys = message
            # Without the layers that only pad the stack.
            ys = [y[: self.schedule.stages.num_layers] for y in ys]
            total, (count, aux, state) = self.cut.behind(leaves, [*carry, *ys])
            return total, (count, self.aux_format.take_apart(aux), state)

        def nothing(message):
            return jax.tree.map(zeros_of, jax.eval_shape(behind, message))

        total, others = lax.cond(self.is_last(turn.chunk), behind, nothing, message)
        return message, total, others

    def _number(self, chunk: Any) -> Any:
        """Returns the position in the stack of a chunk of this stage."""
        return chunk * self.schedule.stages.num_stages + self.index

    def _leaves(self, grad_buffers: Grads, turn: Turn, state: PyTree) -> list[Array]:
        """Returns the leaves of the loss's arguments for one turn, in traced order."""
        shards = [
            dataclasses.replace(
                shard, value=self.part(shard.value, turn.chunk), grad_buffer=grad_buffer
            )
            if shard.param.is_staged
            else dataclasses.replace(shard, grad_buffer=grad_buffer)
            for shard, grad_buffer in zip(self.shards, grad_buffers, strict=True)
        ]
        rows = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, turn.microbatch, keepdims=False),
            self.rows,
        )
        key = jax.random.fold_in(self.key, turn.microbatch)
        if self.early:
            now = [x[turn.microbatch] for x in self.early]
            state = self._with_early(state, now)
        # The order in which `trace_and_split` flattened the arguments of the loss: the
        # parts of `SplitLoss` take leaves by position.
        return jax.tree.leaves((shards, state, rows, key))

    def _with_early(self, state: PyTree, early: Sequence[Array]) -> PyTree:
        """Returns the state with other leaves in the place of `cut.early`."""
        leaves, tree = jax.tree.flatten(state)
        for place, leaf in zip(self.cut.early, early, strict=True):
            leaves[place] = leaf
        return tree.unflatten(leaves)

    def _empty_message(self, state: PyTree) -> PyTree:
        first = Turn(True, 0, 0, 0)
        leaves = self._leaves(self.grad_buffers(0), first, state)
        carry = list(self.cut.carry(leaves))
        stages = self.schedule.stages
        num_layers = stages.num_layers + stages.padding
        # `shapes` are those of the stack's result, `(carry, ys)`, flat.
        ys = self.cut.stack.shapes[len(carry) :]
        return carry, [jnp.zeros((num_layers, *y.shape[1:]), y.dtype) for y in ys]

    def _chunk(self, leaves: list[Array], message: PyTree, turn: Turn) -> PyTree:
        """Runs the layers of a chunk; the first chunk computes its input itself."""
        stages, number = self.schedule.stages, self._number(turn.chunk)
        carry, ys = message
        # All stages run one program: only at run time is the first chunk known.
        carry = lax.cond(
            number == 0, lambda: list(self.cut.carry(leaves)), lambda: list(carry)
        )
        layers = number * stages.chunk_size + jnp.arange(stages.chunk_size)
        # None leaves out the cond around each layer.
        is_real = layers < stages.num_layers if stages.padding else None
        operands = self._operands(leaves, carry, layers)
        carry, new = self.cut.stack.run_chunk(operands, is_real)
        ys = [
            lax.dynamic_update_slice_in_dim(y, own, layers[0], 0)
            for y, own in zip(ys, jax.tree.leaves(new), strict=True)
        ]
        return jax.tree.leaves(carry), ys

    def _operands(self, leaves: list[Array], carry: list[Array], layers: Array):
        # Operands of the chunk in the order of the traced scan, by role:
        #
        #     role    taken from                          shape here
        #     SHARDS  leaves of the loss's arguments,     [chunk layers, ...]: `_leaves`
        #             by the positions in `cut.shards`    has sliced the chunk
        #     OTHERS  `cut.beside`: computed before the   [chunk layers, ...]: sliced
        #     XS      stack from the leaves, for all      here from [num_layers, ...]
        #             layers
        #     CARRY   the message, or `cut.carry` for     that of one activation
        #             the first chunk
        #     CONSTS  `cut.beside`                        any: the same for all layers
        #
        # `cut.beside` returns OTHERS, XS and CONSTS in this order, and within a role
        # in that of the scan's operands, so one iterator serves all three.
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
            else:  # OTHERS, XS; padding layers read the last layer's, and skip it.
                yield jnp.asarray(next(beside))[jnp.minimum(layers, last)]


def zeros_of(shape: Any) -> Array:
    """Returns zeros of a shape; for a PRNG key, an arbitrary key."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape.shape)
    return jnp.zeros(shape.shape, shape.dtype)


def part_of(stages: Stages, x: Any, chunk: Any) -> Any:
    """Returns a chunk's layers of arrays stacked over its stage's layers."""
    if stages.num_virtual == 1:
        return x
    size = stages.chunk_size
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, chunk * size, size), x)
