"""A vocabulary a chunk at a time, so that memory does not hang on what XLA fuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fsdp_jax._tree import PyTree
from fsdp_jax.ops.vocab._shard import Part

CHUNK = 8192
"""Entries of the vocabulary at a time, on each rank."""


class Chunk(NamedTuple):
    """Some neighbouring entries of a rank's part of the vocabulary.

    Attributes:
      start: The first one, counted from where the part starts.
      columns: Each one's number in the whole vocabulary.
      counts: Which are no padding.
      is_new: Which are in no earlier chunk: the last chunk may reach back.
    """

    start: Int[Array, ""]
    columns: Int[Array, "1 chunk"]
    counts: Bool[Array, "1 chunk"]
    is_new: Bool[Array, "1 chunk"]


def num_chunks(size: int, most: int) -> int:
    """How many chunks of at most `most` a part of `size` entries has."""
    return -(-size // most)


def chunk_width(size: int, number: int) -> int:
    """What all chunks of a part have, the last one too: one program fits them all."""
    return -(-size // number)


def chunk_of(part: Part, size: int, number: int, index: Int[Array, ""] | int) -> Chunk:
    """One of `number` chunks of a part of `size` entries."""
    width = chunk_width(size, number)
    start = jnp.minimum(index * width, size - width)
    within = start + jnp.arange(width, dtype=jnp.int32)[None]
    columns = part.first(size) + within
    return Chunk(start, columns, columns < part.vocab_size, within >= index * width)


def in_float32(x: Float[Array, ...]) -> Float[Array, ...]:
    """In float32 at least, which sums are in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def over_chunks(
    part: Part,
    logits: Float[Array, "tokens vocab"],
    fn: Callable[[Chunk, Float[Array, "tokens chunk"]], PyTree],
) -> PyTree:
    """Stacks `fn(chunk, logits)`, of each chunk of a rank's logits in float32."""
    size = logits.shape[1]
    number = num_chunks(size, CHUNK)
    width = chunk_width(size, number)

    def of_chunk(index):
        chunk = chunk_of(part, size, number, index)
        piece = lax.dynamic_slice_in_dim(logits, chunk.start, width, axis=1)
        return fn(chunk, in_float32(piece))

    return lax.map(of_chunk, jnp.arange(number))
