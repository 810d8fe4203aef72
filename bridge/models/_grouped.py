"""Grouped matrix multiplication in blocks of rows, for GPUs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

Rows = Float[Array, "rows embed"]
Kernel = Float[Array, "groups embed *width"]
Sizes = Int[Array, " groups"]

_SMALLEST, _LARGEST = 128, 2048
"""Bounds on the rows of a block: large enough to amortize the launch and the slice of
the group's matrix, small enough as up to one extra block per group is wasted."""


def grouped_matmul(
    x: Rows,
    kernel: Kernel,
    group_sizes: Sizes | np.ndarray,
    *,
    expected_rows: int | None = None,
) -> Float[Array, "rows *width"]:
    """Multiplies rows, sorted by group, each by the matrix of its group.

    Equivalent to `jax.lax.ragged_dot`, for which XLA has no kernel on NVIDIA GPUs: it
    multiplies all rows by every matrix there, with `groups` times the work and memory.
    Here each block of rows is multiplied by the matrices of the groups it has rows of.
    On other platforms, and with a single group, this is `ragged_dot`.

    Args:
      x: Rows sorted by group: the first `group_sizes[0]` belong to group 0, and so on.
      kernel: One matrix per group, `[groups, embed, *width]`.
      group_sizes: Number of rows of each group; rows after the last group give zeros.
        A numpy array of equal sizes that cover all rows gives one batched product.
      expected_rows: Expected number of rows in all groups together; None for all rows.
        If it is at most half of the rows, blocks after the last group are skipped, a
        few at a time: the host then waits for the number of blocks.

    Returns:
      Products, in the wider dtype of both arguments, accumulated at least in float32.

    Source: MegaBlocks (arXiv:2211.15841); its blocks have rows of one group, and these
      of several, as in jax's `pallas.ops.tpu.megablox`.
    """
    width = kernel.shape[2:]
    product = _of_matrices(
        x, kernel.reshape(*kernel.shape[:2], -1), group_sizes, expected_rows
    )
    return product.reshape(len(x), *width)


def _of_matrices(
    x: Rows,
    kernel: Float[Array, "groups embed width"],
    group_sizes: Sizes | np.ndarray,
    expected_rows: int | None,
) -> Float[Array, "rows width"]:
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
    return on_gpus(blocks, lax.ragged_dot, x, kernel, group_sizes)


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
    return *on_gpus(of_blocks, of_ragged_dot, *given), None


_grouped.defvjp(_forward, _backward)


def on_gpus(
    blocks: Callable[..., Any], ragged_dot: Callable[..., Any], *args: Array
) -> Any:
    """Runs `blocks` on GPUs, and `ragged_dot` on other platforms."""
    return lax.platform_dependent(*args, cuda=blocks, rocm=blocks, default=ragged_dot)


class _Visits(NamedTuple):
    """Pairs of a block of rows and a group with rows in it, in the order of groups.

    Attributes:
      group: Index of the group.
      start: First row of the block.
      begin: First row of the group that is not in an earlier block.
      end: Row after the last row of the group; 0 in padding visits.
      is_first: Whether it is the group's first block.
    """

    group: Int[Array, " visits"]
    start: Int[Array, " visits"]
    begin: Int[Array, " visits"]
    end: Int[Array, " visits"]
    is_first: Array

    def is_in(self, size: int) -> Array:
        """Returns, for a single visit, the mask of the block's rows in the group."""
        row = self.start + jnp.arange(size)
        return ((row >= self.begin) & (row < self.end))[:, None]


def rows_in_blocks(
    x: Rows,
    kernel: Kernel,
    group_sizes: Sizes,
    *,
    transposed: bool = False,
    expected: int | None = None,
    dtype: DTypeLike | None = None,
) -> Array:
    """Computes `grouped_matmul` in blocks, by each group's matrix or its transpose.

    In `dtype`, or for None in the wider dtype of both.
    """
    rounds = _Rounds.of(len(x), len(group_sizes), expected)
    size, visits, due = _visits(len(x), group_sizes, rounds.visits)
    contracted = 2 if transposed else 1

    def visit(out, one):
        rows = lax.dynamic_slice_in_dim(x, one.start, size)
        matrix = lax.dynamic_index_in_dim(kernel, one.group, keepdims=False)
        dims = ((1,), (contracted - 1,)), ((), ())
        with jax.named_scope(rounds.scope(expected or len(x), size)):
            made = lax.dot_general(rows, matrix, dims, preferred_element_type=dtype)
        before = lax.dynamic_slice_in_dim(out, one.start, size)
        # A block is visited once per group with rows in it: keep rows of other groups.
        made = jnp.where(one.is_in(size), made, before)
        return lax.dynamic_update_slice_in_dim(out, made, one.start, 0), None

    shape = len(x), kernel.shape[3 - contracted]
    out = jnp.zeros(shape, dtype or jnp.result_type(x, kernel))
    return _each(visit, out, visits, due, rounds)


def matrices_in_blocks(
    x: Rows,
    grad: Float[Array, "rows width"],
    group_sizes: Sizes,
    dtype: DTypeLike,
    *,
    expected: int | None = None,
) -> Kernel:
    """Returns `x.T @ grad` of each group: the gradient of its matrix.

    Blocks are summed at least in float32, one group after the other, so that only one
    float32 matrix is alive.
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
        # Overwritten by each visit of the group; the last one writes the full sum.
        out = lax.dynamic_update_index_in_dim(out, sums.astype(dtype), one.group, 0)
        return (sums, out), None

    shape = (x.shape[1], grad.shape[1])
    start = jnp.zeros(shape, wide), jnp.zeros((len(group_sizes), *shape), dtype)
    return _each(visit, start, visits, due, rounds)[1]


_MOST_ROUNDS = 16
"""Maximum number of rounds that visits are split into, if not all are expected."""


class _Rounds(NamedTuple):
    """Division of the visits into rounds.

    Attributes:
      visits: Maximum number of visits: blocks plus groups minus one, rounded up to
        full rounds.
      at_once: Number of visits in a round.
      expected: Expected number of rounds; None if all visits run in one scan.
    """

    visits: int
    at_once: int
    expected: int | None

    def scope(self, rows: int, size: int) -> str:
        """Name of the products, from which the planner counts rows without padding.

        Args:
          rows: Number of rows that are expected.
          size: Number of rows of a block.
        """
        return f"rows_of_experts_{rows}_of_{self.at_once * size}"

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
    """Runs the visits that are due, in order; padding visits have no effect."""
    if rounds.expected is None:
        return lax.scan(visit, state, visits)[0]

    def run(loop):
        at, state = loop
        these = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, at, rounds.at_once), visits
        )
        return at + rounds.at_once, lax.scan(visit, state, these)[0]

    # The planner reads the expected trip count from this name: the real one depends on
    # data, so that the compiled program does not contain it.
    with jax.named_scope(f"about_{rounds.expected}_times"):
        start = jnp.zeros((), due.dtype), state
        return lax.while_loop(lambda loop: loop[0] < due, run, start)[1]


def _visits(
    rows: int, group_sizes: Sizes, visits: int
) -> tuple[int, _Visits, Int[Array, ""]]:
    """Returns the block size, `visits` visits, and the number of visits that are due.

    Visits after those that are due repeat the last one, with no rows.
    """
    size = _block_size(rows, len(group_sizes))
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    # Group g has rows in `count[g]` blocks from `first[g]` on; its visits are numbers
    # `last[g] - count[g]` to `last[g] - 1`.
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
        # The last block may be shifted to end at the last row; `begin` then masks the
        # rows that it shares with the block before it.
        start=jnp.clip(block * size, 0, rows - size),
        begin=jnp.maximum(starts[group], block * size),
        end=jnp.where(is_due, ends[group], 0),
        is_first=is_due & (block == first[group]),
    )
    return size, found, last[-1]


def _block_size(rows: int, groups: int) -> int:
    """Returns a power of two of at most half the average rows of a group, in bounds."""
    size = max(_SMALLEST, min(_LARGEST, rows // (2 * groups)))
    return min(rows, 1 << (size.bit_length() - 1))
