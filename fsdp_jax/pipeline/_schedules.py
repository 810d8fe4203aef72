"""One step of a pipeline: microbatches go from stage to stage, and gradients back.

All stages run one program, tick by tick. In a tick a stage takes what its neighbour
made in the last one, runs one chunk of its layers, and passes the result on; the first
stage makes the input of the first chunk itself, the last one the loss. What a stage has
no turn for it skips.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fsdp_jax._tree import PyTree
from fsdp_jax.pipeline._p2p import from_last, pass_on
from fsdp_jax.pipeline._stage import Grads, Stage, zeros_of
from fsdp_jax.sharding._stages import Turn
from fsdp_jax.step._float_partition import Mixed
from fsdp_jax.step._shard import Shard


def one_forward_one_backward(
    stage: Stage, state: PyTree, scale: Any
) -> tuple[Grads, PyTree, Any]:
    """All microbatches, each backward as soon as its forward is through.

    A stage keeps what entered it, and runs its chunk again for backward. What it keeps
    is bounded by the stages: `Schedule.num_slots` inputs.

    Args:
      stage: This device's.
      state: The model's.
      scale: Of the loss, before gradients are made of it.

    Returns:
      The gradients, of the stack as this stage's layers, of all else this stage's part
      of the sum; the model state; and `(totals, counts, aux)`, a leading dim of
      microbatches on each. The last two are the last stage's on all of them.
    """
    schedule = stage.schedule
    shapes = stage.message(state)
    mixed = Mixed.of(shapes)
    empty = jax.tree.map(zeros_of, shapes)
    kept = jax.tree.map(
        lambda x: jnp.zeros((schedule.num_slots, *x.shape), x.dtype), shapes
    )
    outs = jax.tree.map(
        lambda x: jnp.zeros((schedule.num_microbatches, *x.shape), x.dtype),
        stage.out_shapes(empty, state),
    )
    grads = [shard.sink for shard in stage.shards]

    def tick(loop, tick):
        message, d_message, kept, grads, state, outs = loop
        ahead = schedule.forward(tick, stage.index)
        behind = schedule.backward(tick, stage.index)
        # Each way of passing on stands before what it does not wait for.
        d_message = pass_on(d_message, schedule.stages.num_stages, -1)
        kept = _put(kept, message, ahead.slot, ahead.is_due)
        with turns(0, schedule.forward_ticks):
            message = lax.cond(
                # What comes of the last chunk is needed, and made, in backward alone.
                ahead.is_due & ~stage.is_last(ahead.chunk),
                lambda: stage.forward(stage.sinks(ahead.chunk), message, ahead, state),
                lambda: empty,
            )
        message = pass_on(message, schedule.stages.num_stages, 1)
        with turns(schedule.stages.num_chunks - 1, schedule.ticks):
            d_message, grads, state, outs = lax.cond(
                behind.is_due,
                lambda *args: _backward(stage, mixed, scale, behind, kept, *args),
                lambda *args: args,
                *(d_message, grads, state, outs),
            )
        return (message, d_message, kept, grads, state, outs), None

    (d_empty,) = mixed.floats((empty,))
    start = (empty, d_empty, kept, grads, state, outs)
    loop, _ = lax.scan(tick, start, jnp.arange(schedule.ticks))
    *_, grads, state, outs = loop
    state, outs = from_last(schedule.stages.num_stages, (state, outs))
    return grads, state, outs


def _backward(
    stage: Stage,
    mixed: Mixed,
    scale: Any,
    turn: Turn,
    kept: PyTree,
    d_message: list[Array],
    grads: Grads,
    state: PyTree,
    outs: PyTree,
):
    """One chunk forward again, and backward: adds to `grads` and, if last, `outs`."""
    kept = jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, turn.slot, keepdims=False), kept
    )
    (floats,), (others,) = mixed.floats((kept,)), mixed.others((kept,))

    def of_floats(sinks, floats):
        (message,) = mixed.join((floats,), (others,))
        message, total, out = stage.with_loss(sinks, message, turn, state)
        (floats,) = mixed.floats((message,))
        return (floats, total), out

    (_, total), pull, (count, aux, after) = jax.vjp(
        of_floats, stage.sinks(turn.chunk), floats, has_aux=True
    )
    is_last = stage.is_last(turn.chunk)
    d_message = [jnp.where(is_last, 0, d) for d in d_message]
    new, d_message = pull((d_message, jnp.full_like(total, scale)))
    grads = [
        _add(stage, shard, grad, more, turn.chunk)
        for shard, grad, more in zip(stage.shards, grads, new, strict=True)
    ]
    state = jax.tree.map(lambda o, n: jnp.where(is_last, n, o), state, after)
    outs = _put(outs, (total, count, aux), turn.microbatch, is_last)
    return d_message, grads, state, outs


def all_forward_all_backward(
    stage: Stage, state: PyTree, scale: Any
) -> tuple[Grads, PyTree, Any]:
    """As `one_forward_one_backward`, by differentiating the loop of all forwards."""

    def of_sinks(sinks):
        total, *others = forward_only(stage, state, sinks)
        return total, others

    sinks = [shard.sink for shard in stage.shards]
    total, pull, (state, outs) = jax.vjp(of_sinks, sinks, has_aux=True)
    (grads,) = pull(jnp.full_like(total, scale))
    stages = stage.schedule.stages.num_stages
    return grads, *from_last(stages, (state, outs))


def forward_pass(stage: Stage, state: PyTree) -> tuple[PyTree, Any]:
    """All microbatches forward, for a look: the model state and `(totals, ...)`."""
    _, state, outs = forward_only(stage, state, [shard.sink for shard in stage.shards])
    return from_last(stage.schedule.stages.num_stages, (state, outs))


def forward_only(stage: Stage, state: PyTree, sinks: Grads):
    """The loop of all forwards, of which each tick runs again for backward.

    Returns:
      The sum of the losses that this stage made, which are those of the last one; the
      model state and the results of the microbatches there.
    """
    schedule = stage.schedule
    empty = jax.tree.map(zeros_of, stage.message(state))

    @jax.checkpoint
    def tick(loop, tick):
        message, state = loop
        turn = schedule.forward(tick, stage.index)

        def run(message, state):
            own = [
                stage.part(sink, turn.chunk) if shard.row.is_staged else sink
                for shard, sink in zip(stage.shards, sinks, strict=True)
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
    (_, state), outs = lax.scan(tick, (empty, state), ticks)
    last = [schedule.last_tick(m) for m in range(schedule.num_microbatches)]
    outs = jax.tree.map(lambda x: x[jnp.array(last)], outs)
    return outs[0].sum(), state, outs


def turns(start: int, stop: int):
    """A scope that tells a replay in which ticks some stage has a turn.

    Since stages wait for each other, a tick takes as long as that stage.
    """
    return jax.named_scope(f"turns_{start}_{stop}")


def _put(kept: PyTree, new: PyTree, slot: Any, is_due: Any) -> PyTree:
    """Writes `new` into a slot, if it is due."""

    def put(kept, new):
        old = lax.dynamic_index_in_dim(kept, slot, keepdims=False)
        return lax.dynamic_update_index_in_dim(
            kept, jnp.where(is_due, new, old), slot, 0
        )

    return jax.tree.map(put, kept, new)


def _add(stage: Stage, shard: Shard, grad: Any, more: Any, chunk: Any) -> Any:
    """Adds the gradient of a turn; of the stack, to its chunk's part."""
    if grad is None or more is None:
        return grad
    stages = stage.schedule.stages
    if not shard.row.is_staged or stages.num_virtual == 1:
        return grad + more
    more = stage.part(grad, chunk) + more
    start = chunk * stages.chunk_size
    return lax.dynamic_update_slice_in_dim(grad, more, start, 0)
