"""Indexer of sparse attention: the keys that each query attends to."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float

from bridge.models._config import DecoderConfig
from bridge.models._linear import Linear
from bridge.models._norm import Norm
from bridge.models._position_tables import PositionTables
from bridge.models._rope import apply_rope, rotate_last

IndexKeys = Float[Array, "batch keys index_dim"]
Selected = Bool[Array, "batch seq keys"]


class Indexer(nnx.Module):
    """Scores of small heads, of which the highest select keys.

    A score is the sum of the heads' rectified products of query and key, weighted by a
    projection of the query's token. Nothing is differentiated: the selection is
    discrete, and no loss of a language model trains the indexer.

    Args:
      config: Config of the decoder, with an indexer.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_deepseek_v32.py::DeepseekV32Indexer`,
      `modeling_hy_v4.py::HYV4Indexer`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes the projections and the norm of the keys."""
        sizes, mla = config.indexer, config.mla
        assert sizes is not None and mla is not None and mla.q_lora_rank is not None
        embed, heads, width = config.hidden_size, sizes.num_heads, sizes.head_dim

        def linear(into: tuple[int, ...], out: tuple[int, ...]) -> Linear:
            std = config.initializer_range
            return Linear(into, out, std=std, rngs=rngs, param_dtype=param_dtype)

        self.q_proj = linear((mla.q_lora_rank,), (heads, width))
        self.k_proj = linear((embed,), (width,))
        self.k_norm = Norm(
            (width,), "layer", sizes.norm_eps, bias=True, param_dtype=param_dtype
        )
        self.weights_proj = linear((embed,), (heads,))
        self.num_selected = sizes.num_selected
        self.interleaved, self.rotates_last = sizes.interleaved, sizes.rotates_last
        self.scale = (heads * width) ** -0.5

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
        latent: Float[Array, "batch seq q_rank"],
        keys: IndexKeys,
        tables: PositionTables,
        mask: Bool[Array, "#batch seq keys"],
    ) -> Selected:
        """Selects keys for each token; all that its mask has if these are few.

        Args:
          x: Normed hidden states.
          latent: Latent vectors of the queries.
          keys: Key of each token so far.
          tables: Tables of the positions of `x`.
          mask: True for keys that a token may attend to.

        Returns:
          True for the selected keys; never where the mask is False.
        """
        query = self._apply_rope(self.q_proj(latent), tables)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        weights = self.weights_proj(x).astype(wide) * self.scale
        scores = weighted_scores(query.astype(wide), keys.astype(wide), weights)
        return select_highest(jax.lax.stop_gradient(scores), mask, self.num_selected)

    def _apply_rope(self, heads: Array, tables: PositionTables) -> Array:
        assert tables.cos is not None and tables.sin is not None
        turn = rotate_last if self.rotates_last else apply_rope
        return turn(heads, tables.cos, tables.sin, interleaved=self.interleaved)


def select_highest(
    scores: Float[Array, "batch seq keys"],
    mask: Bool[Array, "#batch seq keys"],
    num_selected: int,
) -> Selected:
    """Returns the keys of the highest scores, of those in the mask.

    Args:
      scores: Score of each key.
      mask: True for keys that a token may attend to.
      num_selected: Number of keys to select.
    """
    scores = jnp.where(mask, scores, -jnp.inf)
    _, chosen = jax.lax.top_k(scores, num_selected)
    batch, seq, count = scores.shape
    rows = jnp.arange(batch)[:, None, None], jnp.arange(seq)[None, :, None]
    selected = jnp.zeros((batch, seq, count), jnp.bool_).at[*rows, chosen].set(True)
    return selected & mask


def weighted_scores(
    query: Float[Array, "batch seq heads index_dim"],
    keys: IndexKeys,
    weights: Float[Array, "batch seq heads"],
) -> Float[Array, "batch seq keys"]:
    """Sums the scores head by head, so that those of all heads never exist at once.

    Args:
      query: Queries of the heads.
      keys: Keys, shared by all heads.
      weights: Weight of each head.
    """

    def add(total: Array, head: tuple[Array, Array]) -> tuple[Array, None]:
        own, weight = head
        products = jnp.einsum("bqd,bkd->bqk", own, keys)
        return total + weight[..., None] * jax.nn.relu(products), None

    heads = jnp.moveaxis(query, 2, 0), jnp.moveaxis(weights, 2, 0)
    zeros = jnp.zeros((*query.shape[:2], keys.shape[1]), query.dtype)
    return jax.lax.scan(add, zeros, heads)[0]
