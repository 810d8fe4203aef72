"""Zigzag order of tokens over `cp`, which balances the work of causal attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

PyTree = Any


def zigzag(tree: PyTree, ranks: int, *, dim: int = 1) -> PyTree:
    """Permutes tokens of rows so that an even split gives each rank equal causal work.

    A row is cut into `2 * ranks` chunks, and rank `i` gets chunks `i` and
    `2 * ranks - 1 - i`: one from the beginning, whose queries see few keys, and one
    from the end, whose queries see many. With contiguous parts the last rank would have
    the most work in causal attention, and all others would wait for it.

    Apply it to everything that is indexed by token: tokens, targets, segment ids,
    masks, and positions in the batch. Shift targets before.

    Args:
      tree: Arrays of numpy or jax whose dim `dim` is the sequence.
      ranks: Number of devices on `cp`; with 1 nothing changes.
      dim: Sequence dim; 1 in `[batch, seq]`.

    Returns:
      The same tree, permuted; split evenly along `dim`, each part is a rank's.

    Raises:
      ValueError: If `2 * ranks` does not divide a sequence; lists all offenders.

    Source: Megatron-LM `training/utils.py::get_batch_on_this_cp_rank`; the order of
      Zhu, `ring-flash-attention`.
    """
    return _reordered(tree, ranks, dim, _order(ranks))


def inverse_zigzag(tree: PyTree, ranks: int, *, dim: int = 1) -> PyTree:
    """Permutes tokens from zigzag order back to the order of the text.

    Args:
      tree: Arrays in the order of `zigzag`.
      ranks: Number of devices on `cp`, as passed to `zigzag`.
      dim: Sequence dim, as passed to `zigzag`.

    Returns:
      The tree that was passed to `zigzag`.

    Raises:
      ValueError: If `2 * ranks` does not divide a sequence; lists all offenders.
    """
    return _reordered(tree, ranks, dim, np.argsort(_order(ranks)))


def zigzag_positions(
    tokens: Int[Array, "batch seq"], *, axis: str = "cp"
) -> Int[Array, "batch seq"]:
    """Returns the positions in their rows of this rank's tokens.

    Pass it as `positions` to `bridge.models.Decoder`, or use it in any other model with
    rotary or learned position embeddings.

    Args:
      tokens: Tokens of this rank, from rows in the order of `zigzag`.
      axis: Mesh axis. Where it is not manual, rows are unsharded and in order.

    Returns:
      Positions from 0, int32, of the shape of `tokens`.

    Raises:
      ValueError: If a rank's part does not divide into two chunks.
    """
    row = positions_of_rank(tokens.shape[1], axis)
    return jnp.broadcast_to(row[None, :], tokens.shape)


def positions_of_rank(length: int, axis: str) -> Int[Array, " seq"]:
    """Returns the positions in a row of this rank's `length` tokens."""
    ranks = ranks_along(axis)
    if ranks == 1:
        return jnp.arange(length, dtype=jnp.int32)
    check_chunks({"tokens": length * ranks}, ranks)
    within = jnp.arange(length // 2, dtype=jnp.int32)
    chunks = chunks_of(lax.axis_index(axis), ranks)
    return (chunks[:, None] * (length // 2) + within[None, :]).ravel()


def ranks_along(axis: str) -> int:
    """Returns the number of devices along `axis` if it is manual, else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def chunks_of(rank: Int[Array, ""], ranks: int) -> Int[Array, " 2"]:
    """Returns the indices of the two chunks of a rank, ascending."""
    return jnp.stack([rank, 2 * ranks - 1 - rank]).astype(jnp.int32)


def check_chunks(lengths: dict[str, int], ranks: int) -> None:
    """Raises a `ValueError` unless `2 * ranks` divides all row lengths."""
    wrong = [f"{name} of {n}" for name, n in lengths.items() if n % (2 * ranks)]
    if wrong:
        raise ValueError(
            f"Rows do not divide into {2 * ranks} chunks, two for each of {ranks} "
            f"ranks of cp: {', '.join(wrong)} tokens. Use rows of a multiple of "
            f"{2 * ranks}."
        )


def _order(ranks: int) -> np.ndarray:
    """Returns the index of the chunk in each place of the zigzag order."""
    first = np.arange(ranks)
    return np.stack([first, 2 * ranks - 1 - first], axis=1).ravel()


def _reordered(tree: PyTree, ranks: int, dim: int, order: np.ndarray) -> PyTree:
    leaves, treedef = jax.tree.flatten_with_path(tree)
    lengths = {jax.tree_util.keystr(p) or "rows": x.shape[dim] for p, x in leaves}
    check_chunks(lengths if ranks > 1 else {}, ranks)
    if ranks == 1:
        return tree
    return treedef.unflatten(_taken(leaf, dim, order) for _, leaf in leaves)


def _taken(leaf: Any, dim: int, order: np.ndarray) -> Any:
    dim = dim % leaf.ndim
    before, after = leaf.shape[:dim], leaf.shape[dim + 1 :]
    chunks = leaf.reshape(*before, len(order), -1, *after)
    return chunks.take(order, axis=dim).reshape(leaf.shape)
