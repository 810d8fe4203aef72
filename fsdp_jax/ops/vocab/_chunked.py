"""Chunks of the vocabulary, which bound memory independently of XLA's fusion."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fsdp_jax._tree import PyTree
from fsdp_jax.ops.vocab._shard import Part

CHUNK = 8192
"""Default number of vocabulary entries per chunk, on each rank."""


class Chunk(NamedTuple):
    """Consecutive entries of a rank's part of the vocabulary.

    Attributes:
      start: Index of the first entry within the part.
      columns: Index of each entry within the whole vocabulary.
      counts: Mask of entries that are not padding.
      is_new: Mask of entries that are in no earlier chunk: the last chunk may overlap
        the one before, since all chunks have the same width.
    """

    start: Int[Array, ""]
    columns: Int[Array, "1 chunk"]
    counts: Bool[Array, "1 chunk"]
    is_new: Bool[Array, "1 chunk"]


def num_chunks(size: int, most: int) -> int:
    """Returns the number of chunks of at most `most` entries in a part of `size`."""
    return -(-size // most)


def chunk_width(size: int, number: int) -> int:
    """Returns the width of every chunk: equal, so that one program fits them all."""
    return -(-size // number)


def chunk_of(part: Part, size: int, number: int, index: Int[Array, ""] | int) -> Chunk:
    """Returns one of `number` chunks of a part with `size` entries."""
    width = chunk_width(size, number)
    start = jnp.minimum(index * width, size - width)
    within = start + jnp.arange(width, dtype=jnp.int32)[None]
    columns = part.first(size) + within
    return Chunk(start, columns, columns < part.vocab_size, within >= index * width)


def in_float32(x: Float[Array, ...]) -> Float[Array, ...]:
    """Casts to float32 at least, the dtype of all sums."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def over_chunks(
    part: Part,
    logits: Float[Array, "tokens vocab"],
    fn: Callable[[Chunk, Float[Array, "tokens chunk"]], PyTree],
) -> PyTree:
    """Stacks `fn(chunk, logits)` over the chunks of a rank's logits, in float32."""
    size = logits.shape[1]
    number = num_chunks(size, CHUNK)
    width = chunk_width(size, number)

    def of_chunk(index):
        chunk = chunk_of(part, size, number, index)
        piece = lax.dynamic_slice_in_dim(logits, chunk.start, width, axis=1)
        return fn(chunk, in_float32(piece))

    # Sequential, so that only one chunk exists in float32 at a time.
    return lax.map(of_chunk, jnp.arange(number))
