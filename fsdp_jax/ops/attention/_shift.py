"""Shift of rows by some tokens, for multi-token prediction, also over `cp`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax, named_scope
from jaxtyping import Array, Int, Shaped

from fsdp_jax._scopes import SHIFT_TOKENS
from fsdp_jax.ops.attention._zigzag import chunks_of, positions_of_rank, ranks_along


def shift_tokens(
    x: Shaped[Array, "batch seq ..."],
    offset: int = 1,
    *,
    segment_ids: Int[Array, "batch seq"] | None = None,
    fill: complex = 0,
    axis: str = "cp",
) -> Shaped[Array, "batch seq ..."]:
    """Returns, at each place of a row, the element `offset` tokens later.

    Shifts tokens, targets and masks for multi-token prediction within a step. Unlike
    `jax.numpy.roll`, nothing wraps around: where a row or a packed document has no such
    token there is `fill`. Rows that are split over `axis` are in the order of `zigzag`,
    and only the borders of their chunks are communicated: an all-gather of
    `2 * cp * abs(offset)` tokens per row.

    Args:
      x: Elements of this rank's tokens, of any dtype; dims behind the first two are
        those of a token.
      offset: Number of tokens, static: `x[:, i + offset]` moves to place `i`. Negative
        for earlier tokens. Several shifts of 1 are one shift of their sum.
      segment_ids: Segment ids of documents packed in one row, whose borders no element
        crosses. Each document is contiguous and differs from its neighbours. None for
        one document per row.
      fill: Value where there is no such token.
      axis: Mesh axis. Where it is not manual, rows are unsharded and in order.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      ValueError: If a rank's part of a row does not divide into two chunks, or `offset`
        is longer than one of them.

    Examples:
      >>> tokens = jnp.array([[5, 6, 7, 8, 9]])
      >>> fsdp.ops.shift_tokens(tokens).tolist()
      [[6, 7, 8, 9, 0]]
      >>> documents = jnp.array([[1, 1, 1, 2, 2]])
      >>> fsdp.ops.shift_tokens(tokens, segment_ids=documents, fill=-100).tolist()
      [[6, 7, -100, 9, -100]]

    Source: Megatron-LM `multi_token_prediction.py::roll_tensor` (there one border token
      is sent to the neighbour, packed documents are rolled one by one, and a sum is
      returned too).
    """
    ranks = ranks_along(axis)
    source = positions_of_rank(x.shape[1], axis) + offset
    _check_offset(offset, x.shape[1], ranks, axis)
    is_inside = ((source >= 0) & (source < x.shape[1] * ranks))[None]
    with named_scope(SHIFT_TOKENS):
        shifted = _shift(x, offset, ranks, axis)
        if segment_ids is not None:
            documents = _shift(segment_ids, offset, ranks, axis)
            is_inside = is_inside & (documents == segment_ids)
    is_inside = is_inside.reshape(*is_inside.shape, *[1] * (x.ndim - 2))
    return jnp.where(is_inside, shifted, jnp.asarray(fill, x.dtype))


def _check_offset(offset: int, length: int, ranks: int, axis: str) -> None:
    """Raises if elements would come from further than the next chunk."""
    if ranks > 1 and abs(offset) > length // 2:
        raise ValueError(
            f"shift_tokens(offset={offset}) over {axis}={ranks}: each rank has two "
            f"chunks of {length // 2} tokens, and elements come from the next chunk at "
            f"most. Use an offset of at most {length // 2}, longer rows, or shift "
            "before `zigzag`."
        )


def _shift(
    x: Shaped[Array, "batch seq ..."], offset: int, ranks: int, axis: str
) -> Shaped[Array, "batch seq ..."]:
    """Shifts rows; what moves in from beyond a row is arbitrary."""
    if ranks == 1:
        return jnp.roll(x, -offset, axis=1)
    if offset == 0:
        return x
    chunks = x.reshape(x.shape[0], 2, -1, *x.shape[2:])
    if offset > 0:
        later = _neighbour(chunks[:, :, :offset], 1, ranks, axis)
        moved = jnp.concatenate([chunks[:, :, offset:], later], axis=2)
    else:
        earlier = _neighbour(chunks[:, :, offset:], -1, ranks, axis)
        moved = jnp.concatenate([earlier, chunks[:, :, :offset]], axis=2)
    return moved.reshape(x.shape)


def _neighbour(
    borders: Shaped[Array, "batch 2 border ..."], step: int, ranks: int, axis: str
) -> Shaped[Array, "batch 2 border ..."]:
    """Returns the borders of the chunks `step` chunks after this rank's two.

    Borders are gathered, not permuted between neighbours: a collective-permute has to
    run on all devices of the mesh, and stages of a pipeline do not run together.
    """
    gathered = lax.all_gather(borders, axis)  # [rank, batch, 2, border, ...]
    # Rank i has the chunks i and 2 * ranks - 1 - i: in the order of the text, the first
    # chunks of all ranks, then the second ones from the last rank to the first.
    in_order = jnp.concatenate([gathered[:, :, 0], gathered[::-1, :, 1]])
    wanted = (chunks_of(lax.axis_index(axis), ranks) + step) % (2 * ranks)
    return jnp.moveaxis(in_order[wanted], 0, 1)
