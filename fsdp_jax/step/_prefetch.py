"""A scan over units that prefetches weights, forward and backward.

While unit i computes, unit i + prefetch is gathered. Backward gathers unit
i - prefetch, and reduces the gradients of unit i + 1, while unit i computes. XLA moves
no collective from one iteration of a loop to another, so the loop itself is written
with the collectives of other units in the iteration of unit i.

`_scan` runs `prefetching_scan` where a model calls `fsdp.scan`. Where a model calls
`jax.lax.scan`, `nnx.scan` or `nn.scan` itself, `_prefetched_scans.py` finds the loop in
the trace of the loss, and replaces it by `run_stack` of this module.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fsdp_jax._scopes import FSDP_SCAN, traced_as
from fsdp_jax._tree import PyTree
from fsdp_jax.step._batch_sum import sum_over_batch
from fsdp_jax.step._collectives import marked_zeros
from fsdp_jax.step._grad_mark import mark_gradient
from fsdp_jax.step._prefetch_stack import (
    Leaves,
    Stack,
    as_cotangents,
    unit_at,
    with_gradients,
)
from fsdp_jax.step._pullback import Pullback
from fsdp_jax.step._shard import Shard
from fsdp_jax.step._static_runs import StaticRun, join_runs, part_of


def prefetching_scan(
    compute: Callable[..., tuple[PyTree, PyTree]],
    shards: Sequence[Shard],
    carry: PyTree,
    slices: PyTree,
    consts: PyTree,
    *,
    prefetch: int,
    unroll: int,
    runs: Sequence[StaticRun] | None = None,
) -> tuple[PyTree, PyTree]:
    """Runs a stack of units, each gathered `prefetch` units ahead.

    `prefetch + 1` units are unsharded at a time, and with `prefetch` above 1 XLA copies
    one of them. Backward also holds the unreduced gradients of one unit and this
    device's piece of the gradients of the unit before it. The units that are unsharded
    when forward ends are those that backward begins with.

    Args:
      compute: `compute(weights, carry, slices, consts) -> (carry, y)`; with `runs`, it
        takes an argument `static`.
      shards: The stack's own parameters, a leading dim `units` on each.
      carry: Tree passed from unit to unit.
      slices: Trees with the same leading dim, one slice for each unit.
      consts: Trees passed to every unit as they are.
      prefetch: Distance from the unit that computes to the one being gathered, in
        units; at least 1.
      unroll: Units in one iteration of the compiled loop.
      runs: Runs of units with the same static value, each a loop of its own; the
        gathers go on from one to the next. None for one loop.

    Returns:
      The last carry, and the `y`s stacked on a new leading dim.
    """
    given = (carry, slices, consts)
    is_nested = shards[0].param.unit_policy.is_nested
    stack = dataclasses.replace(
        Stack.of(compute, shards, given, prefetch, unroll, runs),
        is_nested=is_nested,
        keeps_window=not is_nested,
    )
    return run_stack(stack, shards, given)


def run_stack(
    stack: Stack, shards: Sequence[Shard], given: tuple[PyTree, PyTree, PyTree]
) -> tuple[PyTree, PyTree]:
    """Runs the units of `stack` as `prefetching_scan` does.

    Args:
      stack: Units, split after their gathers.
      shards: Parameters of the stack, a leading dim `units` on each.
      given: Carry, slices and constants, in the structure of `stack.arguments`.

    Returns:
      The last carry, and the `y`s stacked on a new leading dim.
    """
    shards = list(shards)

    # A custom derivative, since the derivative of a scan would save every unit's
    # gathered weights, gather none of them again, and reduce each gradient in the
    # iteration that computes it.
    @jax.custom_vjp
    @traced_as(FSDP_SCAN)
    def fsdp_scan(shards, floats, others):
        return _forward(stack, shards, floats, others)[0]

    def forward(shards, floats, others):
        out, *saved = _forward(stack, shards, floats, others)
        # Not the carries: each unit's own residuals hold what backward needs of them.
        return out, (shards, saved, floats[1:], others[1:])

    def backward(residuals, cotangents):
        return _backward(stack, residuals, cotangents)

    fsdp_scan.defvjp(forward, backward)
    out, others = fsdp_scan(
        shards, stack.arguments.floats(given), stack.arguments.others(given)
    )
    carry, ys = stack.traced.results.join(out, others)
    return carry, ys


def _forward(stack: Stack, shards, floats, others):
    """Runs the units forward, with `p = prefetch` units gathered ahead.

    In iteration i of n, `w_j` being the gathered values of unit j:

    | in the carry, before | gathered | computes with | in the carry, after |
    |---|---|---|---|
    | `w_i .. w_(i+p-1)` | `w_(i+p)` | `w_i`, slot 0 | `w_(i+1) .. w_(i+p)` |

    `w_n` stands for unit n-1, `w_(n+1)` for unit n-2, see `Stack.values`: after the
    last iteration the window holds units n-1, n-2, ..., n-p, slot 0 first. Forward
    gathers these p units twice, since a slot is reused once its unit has computed.

    Returns:
      `((carry, ys), (other carry, other ys)), saved, window`: the results; for each
      run the residuals of its units, stacked; and the gathered values that backward
      begins with, None if it gathers them itself.
    """
    carry, slices, consts = floats
    other_carry, other_slices, other_consts = others

    def body(static, state, x):
        carry, other_carry, window = state
        i, slices, other_slices = x
        window, ahead = stack.shift(shards, window, i + stack.prefetch)
        others = (other_carry, other_slices, other_consts)

        def of_floats(values, carry, slices, consts):
            return stack.unit(static, values, carry, slices, consts, others)

        # The derivative is taken inside the loop, so that its residuals are results
        # of the scan; jax never differentiates the scan itself.
        (carry, y), pull, (other_carry, other_y) = jax.vjp(
            of_floats, window[0], carry, slices, consts, has_aux=True
        )
        # `Pullback` refers to these leaves by index: `_backward` builds the same tuple.
        known = (window[0], slices, consts, other_slices, other_consts)
        stack.traced.pulls[static], saved = Pullback.of(pull, known)
        return (carry, other_carry, [*window[1:], ahead]), (y, other_y, saved)

    shards, window = stack.window(shards, 0, carry)
    state, made = (carry, other_carry, window), []
    xs = (jnp.arange(stack.num_units), slices, other_slices)
    for run in stack.runs:
        of_run = functools.partial(body, run.value)
        state, out = lax.scan(of_run, state, part_of(xs, run), unroll=stack.unroll)
        made.append(out)
    (carry, other_carry, window), saved = state, [of_run[2] for of_run in made]
    ys, other_ys = join_runs([of_run[:2] for of_run in made])
    left = window if stack.keeps_window else None
    return ((carry, ys), (other_carry, other_ys)), saved, left


class _BackwardCarry(NamedTuple):
    """Carry of the loop of backward, see the table of `_backward`.

    Attributes:
      carry: Cotangent of the units' carry.
      window: Gathered values of the units that run next.
      pending: Gradients of the values of the unit that ran last, unreduced, of those
        that have one.
      reduced: This device's piece of the gradients of the unit before that.
      grad_buffers: Gradients of all units; those that are not written yet are zeros.
      d_consts: Sum of the cotangents of the constants.
    """

    carry: PyTree
    window: list[Leaves]
    pending: Leaves
    reduced: Leaves
    grad_buffers: Leaves
    d_consts: PyTree


def _backward(stack: Stack, residuals, cotangents):
    """Runs the units backward; returns the cotangents of `(shards, floats, others)`.

    Gathers run `p = prefetch` units ahead as in forward; below unit 0 they gather unit
    0 again, for slots that nothing reads. Gradients lag: those of a unit are computed
    in one iteration, reduced in the next one, and written in the one after that. In
    iteration i, from n-1 down to 0:

    | carry | before | in iteration i | after |
    |---|---|---|---|
    | `window` | `w_i .. w_(i-p+1)` | `w_(i-p)` gathered | `w_(i-1) .. w_(i-p)` |
    | `pending` | unit i+1, unreduced | reduced | unit i, unreduced |
    | `reduced` | piece of unit i+2 | written | piece of unit i+1 |
    | `grad_buffers` | units i+3 .. n-1 final | unit i+2 set | units i+2 .. n-1 final |

    The reduction of unit i+1 thus does not depend on what unit i computes, and overlaps
    with it. It must run after that of unit i+2, or XLA combines both into one
    collective. A barrier orders them, and for it the piece of unit i+2 stays apart for
    an iteration: tied to `grad_buffers`, the barrier would hold the gradients of all
    units.

    After the loop, `reduced` (unit 1) is written, and `pending` (unit 0) is reduced and
    written.
    """
    shards, (saved, window), (slices, consts), (other_slices, other_consts) = residuals
    (carry, ys), _ = cotangents
    last = stack.num_units - 1
    if window is None:
        shards, window = stack.window(shards, stack.num_units, (carry, ys))

    def body(static, state, x):
        carry, window, pending, reduced, grad_buffers, d_consts = state
        i, y, saved, slices, other_slices = x
        window, behind = stack.shift(shards, window, i - stack.prefetch)
        # Orders the reductions of units i+1 and i+2, as `shift` orders the gathers.
        pending, reduced = lax.optimization_barrier((pending, reduced))
        # Iterations n-1 and n-2 hold no unit's gradients here. Their index is clamped
        # to n-1, which iteration n-3, or the code after the loop, overwrites.
        grad_buffers = _put(grad_buffers, reduced, jnp.minimum(i + 2, last))
        reduced = _reduced(stack, shards, pending, jnp.minimum(i + 1, last))
        known = (window[0], slices, consts, other_slices, other_consts)
        pull = stack.traced.pulls[static].rebuild(saved, known)
        pending, carry, d_slices, more = pull((carry, y))
        values = known[0]
        pending = with_gradients(values, pending)
        pending = sum_over_batch(pending, with_gradients(values))
        # Every unit reads the same consts, so their cotangents add up.
        d_consts = jax.tree.map(jnp.add, d_consts, more)
        window = [*window[1:], behind]
        after = _BackwardCarry(carry, window, pending, reduced, grad_buffers, d_consts)
        return after, d_slices

    end, made = _first_carry(shards, carry, window, consts), []
    for run, of_run in zip(reversed(stack.runs), reversed(saved), strict=True):
        i, y, *rest = part_of((jnp.arange(last + 1), ys, slices, other_slices), run)
        end, d_slices = lax.scan(
            functools.partial(body, run.value),
            end,
            (i, y, of_run, *rest),
            reverse=True,  # From the last unit to the first one.
            unroll=stack.unroll,
        )
        made.append(d_slices)
    d_slices = join_runs(made[::-1])
    pairs = zip(shards, _all_written(stack, shards, end), strict=True)
    d_shards = [_cotangent(shard, grad_buffer) for shard, grad_buffer in pairs]
    return d_shards, (end.carry, d_slices, end.d_consts), None


def _first_carry(shards, carry, window, consts) -> _BackwardCarry:
    """Returns the carry that backward begins with."""
    # `shard.grad_buffer` is zeros of the shape of the reduced gradients of all units.
    zeros = [shard.grad_buffer for shard in shards]
    return _BackwardCarry(
        carry,
        window,
        pending=jax.tree.map(jnp.zeros_like, with_gradients(window[0])),
        reduced=unit_at(zeros, 0),
        grad_buffers=zeros,
        d_consts=jax.tree.map(jnp.zeros_like, consts),
    )


def _all_written(stack: Stack, shards, end: _BackwardCarry) -> Leaves:
    """Returns the gradients of all units, with those that the loop has not written."""
    written = _put(end.grad_buffers, end.reduced, min(1, stack.num_units - 1))
    return _put(written, _reduced(stack, shards, end.pending, 0), 0)


def _reduced(stack: Stack, shards, grads: Leaves, i: Any) -> Leaves:
    """Reduces `grads`, of the values of unit `i`, to cotangents of its buffers."""
    own = unit_at(shards, i)

    def of_grad_buffers(grad_buffers):
        pairs = zip(own, grad_buffers, strict=True)
        return stack.weights_only(
            [
                dataclasses.replace(shard, grad_buffer=grad_buffer)
                for shard, grad_buffer in pairs
            ]
        )

    # For the derivative alone: the gather in the forward half is dead code, which XLA
    # removes, unless the derivative of what is computed from the weights reads them.
    values, pull = jax.vjp(of_grad_buffers, [shard.grad_buffer for shard in own])
    return pull(as_cotangents(values, grads))[0]


def _cotangent(shard: Shard, grad_buffer: Array | None) -> Shard:
    """Makes the cotangent of a stack from `grad_buffer`, the gradient of all units."""
    value, param = None, shard.param
    if grad_buffer is None:
        value = marked_zeros(param, shard.value)
    else:
        grad_buffer = mark_gradient(grad_buffer, param.name, param.ndim_in_unit)
    return dataclasses.replace(
        shard, value=value, grad_buffer=grad_buffer, accumulated_grad=None
    )


def _put(stacked: PyTree, slices: PyTree, i: Any) -> PyTree:
    return jax.tree.map(
        lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, i, 0),
        stacked,
        slices,
    )
