"""Indexer of block-sparse attention: the blocks of keys that each query attends to."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from bridge.models._config import DecoderConfig
from bridge.models._indexer import IndexKeys
from bridge.models._linear import Linear
from bridge.models._norm import Norm
from bridge.models._position_tables import PositionTables
from bridge.models._positions import text_starts
from bridge.models._rope import apply_rope

SelectedOfHeads = Bool[Array, "batch kv_heads seq keys"]


class Blocks(NamedTuple):
    """Blocks of the keys of rows, each by the slot of its first key.

    Attributes:
      of_keys: Block of each key.
      local: Blocks that each query attends to whatever their scores.
    """

    of_keys: Int[Array, "batch keys"]
    local: Int[Array, "batch seq blocks"]


class BlockIndexer(nnx.Module):
    """Scores of small heads, of which the largest in a block of keys is the block's.

    A score is the product of query and key. Nothing is differentiated: the selection is
    discrete, and no loss of a language model trains the indexer.

    Args:
      config: Config of the decoder, with a `block_indexer`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_minimax_m3_vl.py::MiniMaxM3VLIndexer`. Blocks begin
      with each text of a packed row here, and with each row there.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes the projections and the norms of queries and keys."""
        sizes = config.block_indexer
        assert sizes is not None
        embed, heads, width = config.hidden_size, sizes.num_heads, sizes.head_dim

        def linear(out: tuple[int, ...]) -> Linear:
            std = config.initializer_range
            return Linear((embed,), out, std=std, rngs=rngs, param_dtype=param_dtype)

        def norm() -> Norm:
            kind, epsilon = config.norm, config.norm_eps
            return Norm((width,), kind, epsilon, param_dtype=param_dtype)

        self.q_proj, self.k_proj = linear((heads, width)), linear((width,))
        self.q_norm, self.k_norm = norm(), norm()
        self.sizes = sizes
        self.kv_heads = config.num_key_value_heads
        self.interleaved = config.rope is not None and config.rope.interleaved

    def keys(
        self, x: Float[Array, "batch seq embed"], tables: PositionTables
    ) -> IndexKeys:
        """Returns the key of each token, shared by all heads.

        Args:
          x: Normed hidden states.
          tables: Tables of their positions.
        """
        key = self.k_norm(self.k_proj(x))[:, :, None]
        return self._apply_rope(key, tables)[:, :, 0]

    def select(
        self,
        x: Float[Array, "batch seq embed"],
        keys: IndexKeys,
        tables: PositionTables,
        blocks: Blocks,
        mask: Bool[Array, "#batch seq keys"],
    ) -> SelectedOfHeads:
        """Selects keys for each token and key head.

        Args:
          x: Normed hidden states.
          keys: Key of each token so far.
          tables: Tables of the positions of `x`.
          blocks: Blocks of the keys, and those that are always selected.
          mask: True for keys that a token may attend to.

        Returns:
          True for the keys of selected blocks; never where the mask is False.
        """
        query = self._apply_rope(self.q_norm(self.q_proj(x)), tables)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scores = jnp.einsum("bqhd,bkd->bhqk", query.astype(wide), keys.astype(wide))
        scores = jax.lax.stop_gradient(jnp.where(mask[:, None], scores, -jnp.inf))
        chosen = jax.vmap(self._choose)(scores, blocks)
        selected = jnp.take_along_axis(
            chosen, blocks.of_keys[:, None, None, :], axis=-1
        )
        groups = self.kv_heads // self.sizes.num_heads
        return jnp.repeat(selected & mask[:, None], groups, axis=1)

    def _choose(
        self, scores: Float[Array, "heads seq keys"], blocks: Blocks
    ) -> Bool[Array, "heads seq keys"]:
        """Returns True at the first keys of the blocks that one row selects."""
        heads, seq, count = scores.shape
        pooled = jnp.full_like(scores, -jnp.inf).at[..., blocks.of_keys].max(scores)
        tokens = jnp.arange(seq)[:, None]
        pooled = pooled.at[:, tokens, blocks.local].set(jnp.inf)
        best, chosen = jax.lax.top_k(pooled, min(self.sizes.num_blocks, count))
        at = jnp.arange(heads)[:, None, None], tokens
        none = jnp.zeros(scores.shape, jnp.bool_)
        return none.at[*at, chosen].set(best > -jnp.inf)

    def _apply_rope(self, heads: Array, tables: PositionTables) -> Array:
        if tables.cos is None or tables.sin is None:
            return heads
        return apply_rope(heads, tables.cos, tables.sin, interleaved=self.interleaved)


def blocks_of_texts(
    tokens: tuple[int, int],
    segment_ids: Int[Array, "batch seq"] | None,
    block_size: int,
    num_local_blocks: int,
) -> Blocks:
    """Returns the blocks of whole rows, which begin with each text.

    Args:
      tokens: Number of rows, and of tokens in each.
      segment_ids: Segment of each token in a packed row; None for one segment.
      block_size: Number of keys of a block.
      num_local_blocks: Number of blocks that are always selected.
    """
    slots = jnp.broadcast_to(jnp.arange(tokens[1]), tokens)
    first = jnp.zeros_like(slots) if segment_ids is None else text_starts(segment_ids)
    own = slots - (slots - first) % block_size
    return Blocks(own, _local(own, first, block_size, num_local_blocks))


def blocks_of_slots(
    slots: Int[Array, "batch seq"], keys: int, block_size: int, num_local_blocks: int
) -> Blocks:
    """Returns the blocks of a cache, whose rows are one text each.

    Args:
      slots: Slots of the new tokens.
      keys: Number of slots.
      block_size: Number of keys of a block.
      num_local_blocks: Number of blocks that are always selected.
    """
    every = jnp.broadcast_to(jnp.arange(keys), (len(slots), keys))
    own = slots - slots % block_size
    local = _local(own, jnp.zeros_like(own), block_size, num_local_blocks)
    return Blocks(every - every % block_size, local)


def _local(
    own: Int[Array, "batch seq"], first: Int[Array, "batch seq"], size: int, count: int
) -> Int[Array, "batch seq blocks"]:
    """Returns a query's own block and those before it, down to its text's first."""
    own, first = jnp.expand_dims(own, -1), jnp.expand_dims(first, -1)
    behind = own - size * jnp.arange(count).reshape(1, 1, -1)
    return jnp.maximum(behind, first)
