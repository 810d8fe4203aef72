"""Which keys a query sees, token by token and block by block."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

UNSEEN = jnp.iinfo(jnp.int32).max
"""Position of keys that pad a row: no query sees them."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Static parameters of the scores of attention.

    Attributes:
      scale: Factor of the products of queries and keys.
      softcap: Bound of the scores, by tanh; None for none.
    """

    scale: float
    softcap: float | None = None


class Tokens(NamedTuple):
    """Positions and segments of tokens, which decide what queries see.

    Attributes:
      positions: Position of each token in its row.
      segments: Segment of each token; None for one segment per row.
    """

    positions: Int[Array, "batch seq"]
    segments: Int[Array, "batch seq"] | None


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys the queries of one call of a kernel see.

    Attributes:
      queries: Queries, which see keys up to their own position.
      keys: Keys.
      causal: Whether both are the same tokens in order; else every key is before every
        query. It says no more than the positions, to kernels that do not read these.
    """

    queries: Tokens
    keys: Tokens
    causal: bool


class Ranges(NamedTuple):
    """Blocks that each block visits: from `first` up to, not including, `stop`."""

    first: Int[Array, "batch blocks"]
    stop: Int[Array, "batch blocks"]


def pad_tokens(tokens: Tokens, block: int, position: int) -> Tokens:
    """Pads tokens to whole blocks, with tokens at `position` of segment 0."""
    width = ((0, 0), (0, -tokens.positions.shape[1] % block))
    segments = None
    if tokens.segments is not None:
        segments = jnp.pad(tokens.segments, width)
    positions = jnp.pad(tokens.positions, width, constant_values=position)
    return Tokens(positions, segments)


def block_ranges(
    queries: Tokens,
    keys: Tokens,
    window: Int[Array, ""] | None,
    query_block: int,
    key_block: int,
) -> tuple[Ranges, Ranges]:
    """Returns the key blocks that queries see, and the query blocks that see keys.

    A block is visited if by its smallest and largest positions and segments one of its
    tokens may be seen: too many blocks can be visited, too few cannot.

    Args:
      queries: Queries, padded to whole blocks.
      keys: Keys, padded to whole blocks.
      window: Tokens that a query sees, including its own; None for all before it.
      query_block: Queries per block.
      key_block: Keys per block.
    """
    seen = _may_see(queries, keys, window, query_block, key_block)
    return _range(seen), _range(jnp.swapaxes(seen, 1, 2))


def _may_see(
    queries: Tokens,
    keys: Tokens,
    window: Int[Array, ""] | None,
    query_block: int,
    key_block: int,
) -> Bool[Array, "batch query_blocks key_blocks"]:
    low, high = _limits(queries.positions, query_block)
    key_low, key_high = _limits(keys.positions, key_block)
    seen = key_low[:, None, :] <= high[:, :, None]
    if window is not None:
        seen &= low[:, :, None] - key_high[:, None, :] < window
    if queries.segments is not None and keys.segments is not None:
        low, high = _limits(queries.segments, query_block)
        key_low, key_high = _limits(keys.segments, key_block)
        seen &= key_low[:, None, :] <= high[:, :, None]
        seen &= key_high[:, None, :] >= low[:, :, None]
    return seen


def _limits(
    x: Int[Array, "batch seq"], block: int
) -> tuple[Int[Array, "batch blocks"], Int[Array, "batch blocks"]]:
    blocks = x.reshape(x.shape[0], -1, block)
    return blocks.min(-1), blocks.max(-1)


def _range(seen: Bool[Array, "batch blocks others"]) -> Ranges:
    others = seen.shape[-1]
    first = jnp.argmax(seen, -1)
    stop = others - jnp.argmax(seen[..., ::-1], -1)
    stop = jnp.where(seen.any(-1), stop, first)
    return Ranges(first.astype(jnp.int32), stop.astype(jnp.int32))
