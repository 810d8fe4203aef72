"""Products of rows with their group's matrix, in blocks, for GPUs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

Rows = Float[Array, "rows embed"]
Kernel = Float[Array, "groups embed width"]
Sizes = Int[Array, " groups"]

_SMALLEST, _LARGEST = 128, 2048
"""Rows of a block: enough for a matrix product to be worth its launch, and for the
matrix that is cut out for it; a block more for each group is computed for nothing."""


def grouped_matmul(
    x: Rows,
    kernel: Kernel,
    group_sizes: Sizes | np.ndarray,
    *,
    expected_rows: int | None = None,
) -> Float[Array, "rows width"]:
    """Multiplies rows, sorted by group, each by the matrix of its group.

    As `jax.lax.ragged_dot`, for which XLA has no kernel on NVIDIA's GPUs: it multiplies
    all rows by every matrix there, in `groups` times the work and the memory. Here rows
    are multiplied block by block, each by the matrices of the groups that it holds rows
    of. Elsewhere, and of one group, it is `ragged_dot`.

    Args:
      x: The first `group_sizes[0]` are of the first group, and so on.
      kernel: A matrix for each group.
      group_sizes: Rows of each group; those behind the last one give zeros. What is a
        numpy array with as many rows for each group, of all rows, is one batched
        product.
      expected_rows: How many rows will be of a group, more or less; None: all. Where
        there is room for many more, blocks behind the last group are left out, a few
        at a time: the host waits to be told how many there are.

    Returns:
      The products, in the wider dtype of both; sums are made in float32 at least.

    Source: MegaBlocks (arXiv:2211.15841); its blocks have rows of one group, and these
      of several, as in jax's `pallas.ops.tpu.megablox`.
    """
    groups, rows = len(kernel), len(x)
    if isinstance(group_sizes, np.ndarray) and (group_sizes * groups == rows).all():
        batched = x.reshape(groups, -1, x.shape[1])
        return jnp.einsum("gre,gew->grw", batched, kernel).reshape(rows, -1)
    group_sizes = jnp.asarray(group_sizes)
    if groups == 1 or rows < _SMALLEST:
        return lax.ragged_dot(x, kernel, group_sizes)
    return _grouped(min(expected_rows or rows, rows), x, kernel, group_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    expected: int, x: Rows, kernel: Kernel, group_sizes: Sizes
) -> Float[Array, "rows width"]:
    blocks = functools.partial(rows_in_blocks, expected=expected)
    return _on_gpus(blocks, lax.ragged_dot, x, kernel, group_sizes)


def _forward(expected, x, kernel, group_sizes):
    return _grouped(expected, x, kernel, group_sizes), (x, kernel, group_sizes)


def _backward(expected, saved, grad):
    x, kernel, group_sizes = saved

    def of_ragged_dot(x, kernel, group_sizes, grad):
        def product(x, kernel):
            return lax.ragged_dot(x, kernel, group_sizes)

        return jax.vjp(product, x, kernel)[1](grad)

    def of_blocks(x, kernel, group_sizes, grad):
        given = (kernel, group_sizes)
        of_rows = rows_in_blocks(grad, *given, transposed=True, expected=expected)
        return (
            of_rows.astype(x.dtype),
            matrices_in_blocks(x, grad, group_sizes, kernel.dtype, expected=expected),
        )

    given = (x, kernel, group_sizes, grad)
    return *_on_gpus(of_blocks, of_ragged_dot, *given), None


_grouped.defvjp(_forward, _backward)


def _on_gpus(blocks, ragged_dot, *args):
    return lax.platform_dependent(*args, cuda=blocks, rocm=blocks, default=ragged_dot)


class _Visits(NamedTuple):
    """Blocks of rows, each with a group that it holds rows of, in the order of groups.

    Attributes:
      group: Which one.
      start: The first row of the block.
      begin: The first row that is of both.
      end: The row behind the last one that is.
      is_first: Whether it is the group's first block.
    """

    group: Int[Array, " visits"]
    start: Int[Array, " visits"]
    begin: Int[Array, " visits"]
    end: Int[Array, " visits"]
    is_first: Array

    def is_in(self, size: int) -> Array:
        """Of one visit, which rows of its block are of the group."""
        row = self.start + jnp.arange(size)
        return ((row >= self.begin) & (row < self.end))[:, None]


def rows_in_blocks(
    x: Rows,
    kernel: Kernel,
    group_sizes: Sizes,
    *,
    transposed: bool = False,
    expected: int | None = None,
) -> Array:
    """What `grouped_matmul` is on GPUs; with each group's matrix or its transpose."""
    rounds = _Rounds.of(len(x), len(group_sizes), expected)
    size, visits, due = _visits(len(x), group_sizes, rounds.visits)
    contracted = 2 if transposed else 1

    def visit(out, one):
        rows = lax.dynamic_slice_in_dim(x, one.start, size)
        matrix = lax.dynamic_index_in_dim(kernel, one.group, keepdims=False)
        made = lax.dot_general(rows, matrix, (((1,), (contracted - 1,)), ((), ())))
        before = lax.dynamic_slice_in_dim(out, one.start, size)
        made = jnp.where(one.is_in(size), made, before)
        return lax.dynamic_update_slice_in_dim(out, made, one.start, 0), None

    shape = len(x), kernel.shape[3 - contracted]
    out = jnp.zeros(shape, jnp.result_type(x, kernel))
    return _each(visit, out, visits, due, rounds)


def matrices_in_blocks(
    x: Rows,
    grad: Float[Array, "rows width"],
    group_sizes: Sizes,
    dtype: DTypeLike,
    *,
    expected: int | None = None,
) -> Kernel:
    """Of each group `x.T @ grad`: the gradient of its matrix.

    Summed over blocks in float32 at least, one group after the other, so that no more
    than one matrix is held so.
    """
    rounds = _Rounds.of(len(x), len(group_sizes), expected)
    size, visits, due = _visits(len(x), group_sizes, rounds.visits)
    wide = jnp.promote_types(dtype, jnp.float32)

    def visit(loop, one):
        sums, out = loop
        rows = lax.dynamic_slice_in_dim(x, one.start, size)
        grads = lax.dynamic_slice_in_dim(grad, one.start, size)
        own = lax.dot_general(
            jnp.where(one.is_in(size), rows, 0),
            grads,
            (((0,), (0,)), ((), ())),
            preferred_element_type=wide,
        )
        sums = jnp.where(one.is_first, own, sums + own)
        out = lax.dynamic_update_index_in_dim(out, sums.astype(dtype), one.group, 0)
        return (sums, out), None

    shape = (x.shape[1], grad.shape[1])
    start = jnp.zeros(shape, wide), jnp.zeros((len(group_sizes), *shape), dtype)
    return _each(visit, start, visits, due, rounds)[1]


_MOST_ROUNDS = 16
"""Into so many rounds visits are cut where not all of them are expected."""


class _Rounds(NamedTuple):
    """In how many goes visits are run.

    Attributes:
      visits: How many there may be: one more a group than blocks.
      at_once: How many of these are in a round.
      expected: How many rounds; None if all are run in one go.
    """

    visits: int
    at_once: int
    expected: int | None

    @staticmethod
    def of(rows: int, groups: int, expected: int | None) -> "_Rounds":
        size = _block_size(rows, groups)
        visits = -(-rows // size) + groups - 1
        if expected is None or 2 * expected > rows:
            return _Rounds(visits, visits, None)
        at_once = -(-visits // _MOST_ROUNDS)
        due = -(-expected // size) + groups - 1
        return _Rounds(-(-visits // at_once) * at_once, at_once, -(-due // at_once))


def _each(
    visit: Callable[..., Any],
    state: Any,
    visits: _Visits,
    due: Int[Array, ""],
    rounds: _Rounds,
) -> Any:
    """Runs the visits that are due, in order; the host asks how many rounds that is."""
    if rounds.expected is None:
        return lax.scan(visit, state, visits)[0]

    def run(loop):
        at, state = loop
        these = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, at, rounds.at_once), visits
        )
        return at + rounds.at_once, lax.scan(visit, state, these)[0]

    # By this name a forecast knows what no compiler does.
    with jax.named_scope(f"about_{rounds.expected}_times"):
        start = jnp.zeros((), due.dtype), state
        return lax.while_loop(lambda loop: loop[0] < due, run, start)[1]


def _visits(
    rows: int, group_sizes: Sizes, visits: int
) -> tuple[int, _Visits, Int[Array, ""]]:
    """The rows of a block; so many visits; and how many of them are due.

    Those behind are the last one once more, of no rows.
    """
    size = _block_size(rows, len(group_sizes))
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    first = starts // size
    count = jnp.where(group_sizes > 0, (ends - 1) // size - first + 1, 0)
    last = jnp.cumsum(count)
    number = jnp.arange(visits)
    is_due = number < last[-1]
    number = jnp.minimum(number, last[-1] - 1)
    group = jnp.searchsorted(last, number, side="right", method="compare_all")
    block = first[group] + number - (last[group] - count[group])
    found = _Visits(
        group,
        start=jnp.clip(block * size, 0, rows - size),
        begin=jnp.maximum(starts[group], block * size),
        end=jnp.where(is_due, ends[group], 0),
        is_first=is_due & (block == first[group]),
    )
    return size, found, last[-1]


def _block_size(rows: int, groups: int) -> int:
    """A power of two, of which about two make the rows of a group."""
    size = max(_SMALLEST, min(_LARGEST, rows // (2 * groups)))
    return min(rows, 1 << (size.bit_length() - 1))
