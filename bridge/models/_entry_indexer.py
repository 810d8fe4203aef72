"""Indexer of the entries that each query attends to."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float

from bridge.models._compressor import Compressor, Entries
from bridge.models._config import DecoderConfig
from bridge.models._indexer import Selected, select_highest, weighted_scores
from bridge.models._linear import Linear
from bridge.models._position_tables import PositionTables
from bridge.models._rope import rotate_last


class EntryIndexer(nnx.Module):
    """Scores of small heads, of which the highest select entries.

    It has a compressor of its own, over the windows of the entries. Nothing is
    differentiated, as in `Indexer`.

    Args:
      config: Config of the decoder, with `compressed_attention`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_deepseek_v4.py::DeepseekV4Indexer`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes the compressor and the projections."""
        sizes = config.compressed_attention
        assert sizes is not None
        heads, width = sizes.index_num_heads, sizes.index_head_dim

        def linear(into: int, out: tuple[int, ...]) -> Linear:
            std = config.initializer_range
            return Linear((into,), out, std=std, rngs=rngs, param_dtype=param_dtype)

        self.compressor = Compressor(
            config,
            width,
            sizes.sparse_rate,
            overlaps=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.q_proj = linear(sizes.q_lora_rank, (heads, width))
        self.weights_proj = linear(config.hidden_size, (heads,))
        self.num_selected = sizes.index_num_selected
        self.scale = (heads * width) ** -0.5

    def select(
        self,
        x: Float[Array, "batch seq embed"],
        latent: Float[Array, "batch seq q_rank"],
        entries: Entries,
        tables: PositionTables,
        visible: Bool[Array, "#batch seq entries"],
    ) -> Selected:
        """Selects entries for each token; all that it sees if these are few.

        Args:
          x: Normed hidden states.
          latent: Latent vectors of the queries.
          entries: Entries of this indexer's compressor.
          tables: Tables of the positions of `x`.
          visible: True for entries that a token may attend to.

        Returns:
          True for the selected entries; never where `visible` is False.
        """
        assert tables.cos is not None and tables.sin is not None
        query = rotate_last(self.q_proj(latent), tables.cos, tables.sin)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        weights = self.weights_proj(x).astype(wide) * self.scale
        scores = weighted_scores(query.astype(wide), entries.astype(wide), weights)
        return select_highest(jax.lax.stop_gradient(scores), visible, self.num_selected)
