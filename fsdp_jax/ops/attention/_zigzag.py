"""Which tokens a rank of `cp` has: the zig-zag, under which causal work is even."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

PyTree = Any


def zigzag(tree: PyTree, ranks: int, *, dim: int = 1) -> PyTree:
    """Puts the tokens of rows in the order in which `ranks` of them are split.

    A row is cut into `2 * ranks` chunks, and rank `i` gets the chunks `i` and
    `2 * ranks - 1 - i`: one of the beginning, whose queries see few keys, and one of
    the end, whose queries see many. So all ranks have the same work in causal
    attention, where the last of contiguous parts would have the most, and all others
    would wait for it.

    What belongs together goes through it together: tokens, targets, segment ids, masks
    and positions that a batch brings along. Targets are shifted before.

    Args:
      tree: Arrays, of numpy or jax, whose dim `dim` is the sequence.
      ranks: Devices on `cp`; with 1 nothing changes.
      dim: Of the sequence; 1 in `[batch, seq]`.

    Returns:
      The same tree; split evenly along `dim`, each part is a rank's.

    Raises:
      ValueError: If `2 * ranks` does not divide a sequence; all offenders.

    Source: Megatron-LM `training/utils.py::get_batch_on_this_cp_rank`; the order of
      Zhu, `ring-flash-attention`.
    """
    return _reordered(tree, ranks, dim, _order(ranks))


def inverse_zigzag(tree: PyTree, ranks: int, *, dim: int = 1) -> PyTree:
    """Puts tokens back in the order of the text.

    Args:
      tree: As `zigzag` returned it.
      ranks: As there.
      dim: As there.

    Returns:
      What `zigzag` was given.

    Raises:
      ValueError: As there.
    """
    return _reordered(tree, ranks, dim, np.argsort(_order(ranks)))


def zigzag_positions(
    tokens: Int[Array, "batch seq"], *, axis: str = "cp"
) -> Int[Array, "batch seq"]:
    """The positions in their rows of the tokens that this rank has.

    It is for the `positions` of `bridge.models.Decoder`, and for a model of your own
    that turns heads, or looks positions up, by where tokens stand.

    Args:
      tokens: This rank's part of rows that were put in the order of `zigzag`.
      axis: The mesh axis. Where it is not manual, rows are whole and in order.

    Returns:
      Positions from 0, int32, of the shape of `tokens`.

    Raises:
      ValueError: If a rank's part does not divide into two chunks.
    """
    ranks = ranks_along(axis)
    length = tokens.shape[1]
    if ranks == 1:
        row = jnp.arange(length, dtype=jnp.int32)
    else:
        check_chunks({"tokens": length * ranks}, ranks)
        within = jnp.arange(length // 2, dtype=jnp.int32)
        chunks = chunks_of(lax.axis_index(axis), ranks)
        row = (chunks[:, None] * (length // 2) + within[None, :]).ravel()
    return jnp.broadcast_to(row[None, :], tokens.shape)


def ranks_along(axis: str) -> int:
    """Devices along `axis` where the program is written device by device, else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def chunks_of(rank: Int[Array, ""], ranks: int) -> Int[Array, " 2"]:
    """The numbers of the two chunks that a rank has, in order."""
    return jnp.stack([rank, 2 * ranks - 1 - rank]).astype(jnp.int32)


def check_chunks(lengths: dict[str, int], ranks: int) -> None:
    """Raises a `ValueError` unless `2 * ranks` divides all lengths of rows."""
    wrong = [f"{name} of {n}" for name, n in lengths.items() if n % (2 * ranks)]
    if wrong:
        raise ValueError(
            f"Rows do not divide into {2 * ranks} chunks, two for each of {ranks} "
            f"ranks of cp: {', '.join(wrong)} tokens. Use rows of a multiple of "
            f"{2 * ranks}."
        )


def _order(ranks: int) -> np.ndarray:
    """The chunk that stands in each place."""
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
