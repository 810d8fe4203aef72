"""Differentiable all-to-all of rows with a different number of rows per rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fsdp_jax._tp_shards import num_automatic_tp, on_tp_shards

Sizes = Int[Array, " ranks"]
Groups = tuple[tuple[int, ...], ...]


class Segments(NamedTuple):
    """Row counts of an exchange in one direction.

    Rows for rank 0 come first, then those for rank 1, and so on; received rows are
    ordered by the rank that sent them, followed by zeros.

    Attributes:
      sent: Number of rows sent to each rank.
      received: Number of rows received from each rank.
      places: Offset on each rank at which the rows sent to it are written.
    """

    sent: Sizes
    received: Sizes
    places: Sizes


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Static shapes of an exchange, the same on all ranks.

    Attributes:
      axis: Mesh axis, manual here.
      rows: Number of rows before the exchange.
      most: Maximum number of rows that one rank sends to another.
      room: Number of rows after the exchange, the maximum that all ranks send to one.
      groups: Ranks of each group that exchanges rows within itself; None for all. Other
        counts of ranks then mean those of a group.
      again: Whether another exchange of the same row counts is in the same pass.
    """

    axis: str
    rows: int
    most: int
    room: int
    groups: Groups | None = None
    again: bool = False

    @property
    def reversed(self) -> Exchange:
        """Shapes of the exchange in the opposite direction."""
        return dataclasses.replace(self, rows=self.room, room=self.rows)


def segments_of(
    pairs: Int[Array, "ranks ranks"], rank: Int[Array, ""]
) -> tuple[Segments, ...]:
    """Returns segments of both directions, for `pairs[i, j]` rows from rank i to j."""
    before_source = jnp.cumsum(pairs, axis=0) - pairs
    before_target = jnp.cumsum(pairs, axis=1) - pairs
    there = Segments(pairs[rank], pairs[:, rank], before_source[rank])
    return there, Segments(there.received, there.sent, before_target[:, rank])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def exchange(
    form: Exchange,
    there: Segments,
    back: Segments,
    rows: Float[Array, "rows embed"],
) -> Float[Array, "room embed"]:
    """Sends each rank its rows. The gradient is the exchange in the opposite direction.

    On GPUs and TPUs it uses `lax.ragged_all_to_all`, which sends only the rows that
    exist. XLA does not implement it for CPUs: there an `all_to_all` has `most` slots
    for each pair of ranks, and the result is the same to the bit.

    Args:
      form: Static shapes.
      there: Row counts of this direction.
      back: Row counts of the opposite direction, for the gradient.
      rows: Rows in the order of `Segments`.

    Returns:
      The received rows in the order of `Segments`.
    """
    del back
    ragged = functools.partial(_ragged, form)

    def send(rows, *segments):
        return lax.platform_dependent(
            rows,
            *segments,
            cuda=ragged,
            rocm=ragged,
            tpu=ragged,
            default=functools.partial(_padded, form),
        )

    return send_slices(send, rows, *there)


def _forward(form, there, back, rows):
    return exchange(form, there, back, rows), (there, back)


def _backward(form, segments, grad):
    there, back = segments
    return None, None, exchange(form.reversed, back, there, grad)


exchange.defvjp(_forward, _backward)


def _ragged(form: Exchange, rows: Array, *segments: Sizes) -> Array:
    there = Segments(*segments)
    return lax.ragged_all_to_all(
        rows,
        _zeros(form, there, rows),
        _starts(there.sent),
        there.sent,
        there.places,
        there.received,
        axis_name=form.axis,
        axis_index_groups=form.groups,
    )


def _zeros(form: Exchange, there: Segments, rows: Array) -> Array:
    """Returns what received rows are written into.

    Each exchange has zeros that are a value of its own: those of a constant are one
    array for all, of which XLA makes a copy for each, twice the traffic of a fill.
    """
    never = there.received[0] == (-2 if form.again else -1)
    return jnp.full((form.room, rows.shape[-1]), never.astype(rows.dtype))


def _padded(form: Exchange, rows: Array, *segments: Sizes) -> Array:
    there = Segments(*segments)
    lanes = jnp.arange(form.most, dtype=jnp.int32)[None]
    index = _starts(there.sent)[:, None] + lanes
    is_sent = lanes < there.sent[:, None]
    # Lane l of rank j holds the l-th row for j, up to `most`; unused lanes are zeros.
    sent = jnp.take(rows, index, axis=0, mode="clip")
    sent = jnp.where(is_sent[..., None], sent, 0).reshape(-1, rows.shape[-1])
    found = lax.all_to_all(
        sent, form.axis, 0, 0, axis_index_groups=form.groups, tiled=True
    )
    place = jnp.arange(form.room, dtype=jnp.int32)
    ends = jnp.cumsum(there.received)
    # Compacts the lanes: the source rank of each place, then the row's lane there.
    source = jnp.searchsorted(ends, place, side="right", method="compare_all")
    source = jnp.minimum(source, len(ends) - 1)
    lane = place - jnp.take(_starts(there.received), source)
    packed = jnp.take(found, source * form.most + lane, axis=0, mode="clip")
    return jnp.where((place < ends[-1])[:, None], packed, 0)


def _starts(sizes: Sizes) -> Sizes:
    return jnp.cumsum(sizes) - sizes


def send_slices(
    send: Callable[..., Array], rows: Array, *segments: Sizes
) -> Float[Array, "room embed"]:
    """Calls `send` with each tp rank's slice of the rows where `tp` is automatic."""
    tp = num_automatic_tp()
    if tp == 1 or rows.shape[-1] % tp:
        return send(rows, *segments)
    return on_tp_shards(send, rows, 1, *segments)
