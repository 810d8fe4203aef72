"""Rows that go to other ranks, as many to each as there are, and come back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

Sizes = Int[Array, " ranks"]


class Segments(NamedTuple):
    """How many rows go where, in one direction.

    Rows for the first rank stand first, then those for the second; received rows stand
    in the order of the ranks that they come from, then zeros.

    Attributes:
      sent: Rows for each rank.
      received: Rows from each rank.
      places: Where on each rank the rows for it go.
    """

    sent: Sizes
    received: Sizes
    places: Sizes


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The shapes of an exchange, which are the same on all ranks.

    Attributes:
      axis: The mesh axis, manual here.
      rows: Rows before.
      most: Rows that one rank sends another, at most.
      room: Rows after; those of all ranks, at most.
    """

    axis: str
    rows: int
    most: int
    room: int

    @property
    def reversed(self) -> Exchange:
        """The way back."""
        return dataclasses.replace(self, rows=self.room, room=self.rows)


def segments_of(pairs: Int[Array, "ranks ranks"], axis: str) -> tuple[Segments, ...]:
    """The way there and the way back of rows, `pairs[i, j]` of them from i to j."""
    rank = lax.axis_index(axis)
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
    """Sends each rank its rows; no gradient but that of the rows, which come back.

    On GPUs and TPUs that is `lax.ragged_all_to_all`, which sends the rows that there
    are. XLA has none for CPUs: there each pair of ranks has a place for `most` rows in
    an `all_to_all`, and the result is the same to the bit.

    Args:
      form: The shapes.
      there: How many rows go where.
      back: The same of the way back, which gradients go.
      rows: In the order of `Segments`.

    Returns:
      In the order of `Segments`.
    """
    del back
    ragged = functools.partial(_ragged, form)

    def send(rows, *segments):
        return lax.platform_dependent(
            *(rows, *segments),
            cuda=ragged,
            rocm=ragged,
            tpu=ragged,
            default=functools.partial(_padded, form),
        )

    return at_tp_width(send, rows, *there)


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
        jnp.zeros((form.room, rows.shape[-1]), rows.dtype),
        _starts(there.sent),
        there.sent,
        there.places,
        there.received,
        axis_name=form.axis,
    )


def _padded(form: Exchange, rows: Array, *segments: Sizes) -> Array:
    there = Segments(*segments)
    lanes = jnp.arange(form.most, dtype=jnp.int32)[None]
    index = _starts(there.sent)[:, None] + lanes
    is_sent = lanes < there.sent[:, None]
    sent = jnp.take(rows, index, axis=0, mode="clip")
    sent = jnp.where(is_sent[..., None], sent, 0).reshape(-1, rows.shape[-1])
    found = lax.all_to_all(sent, form.axis, split_axis=0, concat_axis=0, tiled=True)
    place = jnp.arange(form.room, dtype=jnp.int32)
    ends = jnp.cumsum(there.received)
    source = jnp.searchsorted(ends, place, side="right", method="compare_all")
    source = jnp.minimum(source, len(ends) - 1)
    lane = place - jnp.take(_starts(there.received), source)
    packed = jnp.take(found, source * form.most + lane, axis=0, mode="clip")
    return jnp.where((place < ends[-1])[:, None], packed, 0)


def _starts(sizes: Sizes) -> Sizes:
    return jnp.cumsum(sizes) - sizes


def at_tp_width(
    send: Callable[..., Array], rows: Array, *segments: Sizes
) -> Float[Array, "room embed"]:
    """Has each rank on `tp` send its part of a row, where that axis is left to XLA.

    Otherwise XLA would gather rows over it first and send each of them tp times.
    """
    mesh = jax.sharding.get_abstract_mesh()
    tp = mesh.shape.get("tp", 1)
    if tp == 1 or "tp" in mesh.manual_axes or rows.shape[-1] % tp:
        return send(rows, *segments)
    wide, whole = PartitionSpec(None, "tp"), PartitionSpec()
    return jax.shard_map(
        send,
        in_specs=(wide, *(whole for _ in segments)),
        out_specs=wide,
        axis_names={"tp"},
        check_vma=False,
    )(rows, *segments)
