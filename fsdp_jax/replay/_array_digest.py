"""Digest of an array: two sums of hashes of its elements' bits and their indices."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

_SEEDS = (0x243F6A88, 0x85A308D3)  # First 64 bits of pi: two independent seeds.
_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio; odd, so index * _GOLDEN is a bijection.
_PARTS = 8  # In which the terms of a sum are folded.
_MANY = 2**14  # Terms for which this is worth the time to compile it.


def array_digest(
    shard: Array, offsets: Sequence[Any], shape: Sequence[int], num_sums: int = 2
) -> UInt32[Array, " sums"]:
    """Returns the digest of a part of an array.

    Args:
      shard: The part, of any dtype but that of keys.
      offsets: Where it begins in the array, a number for each dim.
      shape: Logical shape of the array; elements outside of it do not count.
      num_sums: 2, or 1 for the first sum alone.
    """
    index = jnp.zeros(shard.shape, jnp.uint32)
    inside = jnp.ones(shard.shape, bool)
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        at = lax.broadcasted_iota(jnp.uint32, shard.shape, dim)
        at = at + jnp.asarray(offset).astype(jnp.uint32)
        index = index + at * jnp.uint32(stride)
        inside = inside & (at < jnp.uint32(size))
    words = _words(shard)
    seeds = _SEEDS[:num_sums]
    return jnp.stack(
        [_sum(jnp.where(inside, _terms(words, index, seed), 0)) for seed in seeds]
    )


def local_digest(x: Array) -> UInt32[Array, ""]:
    """Returns a digest of all of an array: one sum, for what lives for one step.

    A program that takes it of many arrays compiles in half the time.

    Args:
      x: Array of any dtype but that of keys.
    """
    index = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):
        stride = math.prod(x.shape[dim + 1 :]) % 2**32
        at = lax.broadcasted_iota(jnp.uint32, x.shape, dim)
        index = index + at * jnp.uint32(stride)
    return _sum(_terms(_words(x), index, _SEEDS[0]))


def _terms(
    words: Sequence[UInt32[Array, ...]], index: UInt32[Array, ...], seed: int
) -> UInt32[Array, ...]:
    """Returns a hash of each element, from its words and its index."""
    terms = jnp.zeros(index.shape, jnp.uint32)
    for number, word in enumerate(words):
        place = index * jnp.uint32(_GOLDEN) + jnp.uint32((seed + number) % 2**32)
        terms = terms + mixed(word ^ mixed(place))
    return terms


def _sum(terms: UInt32[Array, ...]) -> UInt32[Array, ""]:
    """Adds terms modulo 2^32, in any order.

    XLA for CPUs vectorizes additions of arrays, but no reduction of integers, so parts
    of the longest dim are added first.
    """
    if terms.size < _MANY or max(terms.shape) < _PARTS:
        return jnp.sum(terms, dtype=jnp.uint32)
    dim = int(np.argmax(terms.shape))
    size = terms.shape[dim] // _PARTS
    starts = range(0, _PARTS * size, size)
    parts = [lax.slice_in_dim(terms, i, i + size, axis=dim) for i in starts]
    rest = lax.slice_in_dim(terms, _PARTS * size, terms.shape[dim], axis=dim)
    folded = functools.reduce(operator.add, parts)
    return jnp.sum(folded, dtype=jnp.uint32) + jnp.sum(rest, dtype=jnp.uint32)


def _words(x: Array) -> list[Array]:
    """Returns the bits of each element as one or two words of 32 bits."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real), *_words(x.imag)]
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits == 64:
        pair = lax.bitcast_convert_type(x, jnp.uint32)
        return [pair[..., 0], pair[..., 1]]
    widths = {4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}
    unsigned = widths[bits]
    return [lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)]


def mixed(x: Array) -> Array:
    """Returns each word with its 32 bits mixed, one to one.

    Source: the last step of MurmurHash3.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
