"""Pipeline schedules: microbatches move from stage to stage, and cotangents back.

All stages run one program, tick by tick. In a tick a stage receives what its neighbour
computed in the previous tick, runs one chunk of its layers, and sends the result on.
The first stage computes the input of the first chunk itself, and the last stage the
loss. A stage skips a tick in which it has no turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fsdp_jax._scopes import turns_scope
from fsdp_jax._tree import PyTree
from fsdp_jax.pipeline._p2p import from_last, pass_on
from fsdp_jax.pipeline._stage import Grads, Stage, zeros_of
from fsdp_jax.sharding._stages import Turn
from fsdp_jax.step._float_partition import FloatPartition
from fsdp_jax.step._shard import Shard


class _Carry(NamedTuple):
    """Carry of the loop over ticks, on entry to tick t of stage s.

    Attributes:
      message: Input of the chunk whose forward is due: what stage s - 1 computed in
        tick t - 1. Anything where none is due.
      d_message: Cotangent of the input of the chunk that this stage ran backward in
        tick t - 1. It is sent first; what arrives from stage s + 1 is the cotangent of
        this stage's output.
      inputs: `[num_slots, ...]`: slot n % num_slots holds the input of forward turn n
        of this stage, from that turn to its backward.
      grads: Sum of the gradients of the backward turns so far.
      state: Model state, which the loss changes: valid on the last stage alone.
      outs: `[microbatches, ...]`: (total, count, aux) of each microbatch that the last
        stage has finished; zeros elsewhere.
    """

    message: PyTree
    d_message: list[Array]
    inputs: PyTree
    grads: Grads
    state: PyTree
    outs: PyTree


class _BackwardCarry(NamedTuple):
    """Part of the carry that a backward changes.

    Attributes:
      d_message: Before, the cotangent of the chunk's output; after, that of its input.
      grads: Sum of the gradients of the backward turns so far.
      state: Model state.
      outs: (total, count, aux) of each microbatch.
    """

    d_message: list[Array]
    grads: Grads
    state: PyTree
    outs: PyTree


# Microbatches by tick, 2 stages of one chunk, 4 microbatches, 3 slots:
#
#     tick                0   1   2   3   4   5
#     stage 0  forward    0   1   2   3   .   .
#              backward   .   .   0   1   2   3
#     stage 1  forward    .  (0) (1) (2) (3)  .
#              backward   .   0   1   2   3   .
#
# With 2 chunks a stage (a: the first, b: the second) and 2 microbatches, 4 slots:
#
#     tick                0   1   2   3   4   5   6   7
#     stage 0  forward    0a  1a  0b  1b  .   .   .   .
#              backward   .   .   .   .   0b  1b  0a  1a
#     stage 1  forward    .   0a  1a (0b)(1b) .   .   .
#              backward   .   .   .   0b  1b  0a  1a  .
#
# (m): the last chunk of the stack. Its forward is due and its input is stored, but it
# runs only once, as the recomputation of the backward in the same tick.
def one_forward_one_backward(
    stage: Stage, state: PyTree, scale: Any
) -> tuple[Grads, PyTree, Any]:
    """Runs the backward of each microbatch as soon as its forward is complete.

    A stage stores the input of each chunk and runs the chunk again for backward. At
    most `Schedule.num_slots` inputs are stored, a bound that grows with the number of
    chunks and not with that of microbatches.

    Args:
      stage: Program of this device's stage.
      state: Arrays of the model that are not parameters.
      scale: Factor on the loss before differentiation.

    Returns:
      The gradients: for the stack those of this stage's layers, for all other
      parameters this stage's part of the sum. The model state. `(totals, counts, aux)`,
      each with a leading dim of microbatches. The last two are the last stage's, on all
      stages.
    """
    schedule, num_stages = stage.schedule, stage.schedule.stages.num_stages
    shapes = stage.message(state)
    # Keys and integers in a message have no cotangent.
    partition = FloatPartition.of(shapes)
    start = _first_carry(stage, partition, shapes, state)

    def body(carry: _Carry, tick: Array) -> tuple[_Carry, None]:
        ahead = schedule.forward(tick, stage.index)
        behind = schedule.backward(tick, stage.index)
        # Each send stands before computation that does not depend on it, so that XLA
        # can overlap them: cotangents with the forward, activations with the backward.
        d_message = pass_on(carry.d_message, num_stages, -1)
        # Before the backward, which on the last chunk reads this slot in this tick.
        inputs = _put(carry.inputs, carry.message, ahead.slot, ahead.is_due)
        with turns_scope(0, schedule.forward_ticks):
            message = lax.cond(
                # The output of the last chunk is needed in its backward alone, which
                # computes it.
                ahead.is_due & ~stage.is_last(ahead.chunk),
                lambda: stage.forward(
                    stage.grad_buffers(ahead.chunk), carry.message, ahead, carry.state
                ),
                lambda: start.message,
            )
        message = pass_on(message, num_stages, 1)
        with turns_scope(schedule.stages.num_chunks - 1, schedule.ticks):
            after = lax.cond(
                behind.is_due,
                lambda x: _backward(stage, partition, scale, behind, inputs, x),
                lambda x: x,
                _BackwardCarry(d_message, carry.grads, carry.state, carry.outs),
            )
        return _Carry(message, inputs=inputs, **after._asdict()), None

    last, _ = lax.scan(body, start, jnp.arange(schedule.ticks))
    return last.grads, *from_last(num_stages, (last.state, last.outs))


def _first_carry(
    stage: Stage, partition: FloatPartition, shapes: PyTree, state: PyTree
) -> _Carry:
    """Returns the carry before the first tick: no message, and gradients of zero."""
    schedule = stage.schedule
    empty = jax.tree.map(zeros_of, shapes)
    (d_empty,) = partition.floats((empty,))
    return _Carry(
        message=empty,
        d_message=d_empty,
        inputs=_zeros(schedule.num_slots, shapes),
        grads=[shard.grad_buffer for shard in stage.shards],
        state=state,
        outs=_zeros(schedule.num_microbatches, stage.out_shapes(empty, state)),
    )


def _zeros(num: int, shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros((num, *x.shape), x.dtype), shapes)


def _backward(
    stage: Stage,
    partition: FloatPartition,
    scale: Any,
    turn: Turn,
    inputs: PyTree,
    carry: _BackwardCarry,
) -> _BackwardCarry:
    """Recomputes one chunk and runs its backward.

    Adds to the gradients, and on the last chunk writes the model state and the outputs.
    """
    d_message, grads, state, outs = carry
    message = jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, turn.slot, keepdims=False), inputs
    )
    (floats,), (others,) = partition.floats((message,)), partition.others((message,))

    def of_floats(grad_buffers, floats):
        (message,) = partition.join((floats,), (others,))
        message, total, out = stage.with_loss(grad_buffers, message, turn, state)
        (floats,) = partition.floats((message,))
        return (floats, total), out

    (_, total), pull, (count, aux, after) = jax.vjp(
        of_floats, stage.grad_buffers(turn.chunk), floats, has_aux=True
    )
    is_last = stage.is_last(turn.chunk)
    # The output of the last chunk is used by the loss alone. What the ring brings from
    # the first stage is the cotangent of an input that the first chunk does not read.
    d_message = [jnp.where(is_last, 0, d) for d in d_message]
    new, d_message = pull((d_message, jnp.full_like(total, scale)))
    grads = [
        _add(stage, shard, grad, more, turn.chunk)
        for shard, grad, more in zip(stage.shards, grads, new, strict=True)
    ]
    state = jax.tree.map(lambda o, n: jnp.where(is_last, n, o), state, after)
    outs = _put(outs, (total, count, aux), turn.microbatch, is_last)
    return _BackwardCarry(d_message, grads, state, outs)


def all_forward_all_backward(
    stage: Stage, state: PyTree, scale: Any
) -> tuple[Grads, PyTree, Any]:
    """Runs all forwards, then all backwards, by differentiating the loop of forwards.

    Arguments and results are those of `one_forward_one_backward`.
    """

    def of_grad_buffers(grad_buffers):
        total, *others = forward_only(stage, state, grad_buffers)
        return total, others

    grad_buffers = [shard.grad_buffer for shard in stage.shards]
    total, pull, (state, outs) = jax.vjp(of_grad_buffers, grad_buffers, has_aux=True)
    (grads,) = pull(jnp.full_like(total, scale))
    stages = stage.schedule.stages.num_stages
    return grads, *from_last(stages, (state, outs))


def forward_pass(stage: Stage, state: PyTree) -> tuple[PyTree, Any]:
    """Runs all microbatches forward: the model state and `(totals, counts, aux)`."""
    _, state, outs = forward_only(
        stage, state, [shard.grad_buffer for shard in stage.shards]
    )
    return from_last(stage.schedule.stages.num_stages, (state, outs))


def forward_only(stage: Stage, state: PyTree, grad_buffers: Grads):
    """Runs the loop of all forwards; each tick is rematerialized in backward.

    Returns:
      The sum of the losses that this stage computed: 0 except on the last one. The
      model state. `(totals, counts, aux)` of the microbatches, valid on the last stage.
    """
    schedule = stage.schedule
    empty = jax.tree.map(zeros_of, stage.message(state))

    @jax.checkpoint
    def body(carry, tick):
        message, state = carry
        # Each microbatch takes the state that the one before it left as it is.
        state = lax.stop_gradient(state)
        turn = schedule.forward(tick, stage.index)

        def run(message, state):
            # Sliced here and not in `Stage.grad_buffers`, whose grad_buffers are
            # constants: the gradients are those of this function's argument.
            own = [
                stage.part(grad_buffer, turn.chunk)
                if shard.param.is_staged
                else grad_buffer
                for shard, grad_buffer in zip(stage.shards, grad_buffers, strict=True)
            ]
            message, total, (count, aux, after) = stage.with_loss(
                own, message, turn, state
            )
            is_last = stage.is_last(turn.chunk)
            after = jax.tree.map(lambda o, n: jnp.where(is_last, n, o), state, after)
            return message, after, (total, count, aux)

        def skip(message, state):
            _, _, out = jax.eval_shape(run, message, state)
            return message, state, jax.tree.map(zeros_of, out)

        message, state, out = lax.cond(turn.is_due, run, skip, message, state)
        message = pass_on(message, schedule.stages.num_stages, 1)
        return (message, state), out

    ticks = jnp.arange(schedule.forward_ticks)
    (_, state), outs = lax.scan(body, (empty, state), ticks)
    # One output a tick. A microbatch's is that of the tick of its last chunk.
    last = [schedule.last_tick(m) for m in range(schedule.num_microbatches)]
    outs = jax.tree.map(lambda x: x[jnp.array(last)], outs)
    return outs[0].sum(), state, outs


def _put(slots: PyTree, new: PyTree, slot: Any, is_due: Any) -> PyTree:
    """Writes `new` into a slot if it is due."""

    def put(slots, new):
        old = lax.dynamic_index_in_dim(slots, slot, keepdims=False)
        return lax.dynamic_update_index_in_dim(
            slots, jnp.where(is_due, new, old), slot, 0
        )

    return jax.tree.map(put, slots, new)


def _add(stage: Stage, shard: Shard, grad: Any, more: Any, chunk: Any) -> Any:
    """Adds the gradient of one turn: for the stack, to the layers of its chunk."""
    if grad is None or more is None:
        return grad
    stages = stage.schedule.stages
    if not shard.param.is_staged or stages.num_virtual == 1:
        return grad + more
    more = stage.part(grad, chunk) + more
    start = chunk * stages.chunk_size
    return lax.dynamic_update_slice_in_dim(grad, more, start, 0)
