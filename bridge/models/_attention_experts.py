"""Attention whose queries and projections back are of experts that a router chooses."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._attention import Window
from bridge.models._cache import Slots, attend_cached
from bridge.models._config import DecoderConfig
from bridge.models._expert_split import is_split
from bridge.models._grouped import grouped_matmul
from bridge.models._layer_state import IndexedKeyValues, KeyValues
from bridge.models._position_tables import PositionTables
from bridge.models._router import Router
from bridge.models._self_attention import Heads, MakeLinear, SelfAttention

Rows = Float[Array, "rows *dims"]


class _Routes(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert.

    Attributes:
      order: Position of each sorted pair among those by token.
      sizes: Number of pairs of each expert.
      weights: Weights of the experts of each token.
    """

    order: Int[Array, " pairs"]
    sizes: Int[Array, " experts"]
    weights: Float[Array, "batch seq chosen"]

    @property
    def chosen(self) -> int:
        """Number of experts of a token."""
        return self.weights.shape[-1]

    def by_token(self, rows: Rows) -> Rows:
        """Returns rows of sorted pairs, by token."""
        # The argsort of a permutation is its inverse.
        return jnp.take(rows, jnp.argsort(self.order), axis=0)


class ExpertAttention(SelfAttention):
    """Self-attention with queries of a few experts of many.

    A query head of each chosen expert attends to each key head.

    Args:
      config: Config of the decoder, with `attention_experts`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      **options: Others of `SelfAttention`.

    Source: transformers `modeling_jetmoe.py::JetMoeAttention`, `JetMoeMoA`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        **options: Any,
    ):
        """Initializes the router, the kernels of all experts, keys and values."""
        super().__init__(config, rngs=rngs, param_dtype=param_dtype, **options)
        sizes, embed = config.attention_experts, config.hidden_size
        assert sizes is not None
        heads, std = config.num_key_value_heads, config.initializer_range
        self.router = Router(
            sizes.router(heads * config.head_dim),
            embed,
            std=std,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        init, count = nnx.initializers.normal(std, dtype=param_dtype), sizes.num_experts
        into, back = (embed, heads, config.head_dim), (heads, config.v_head_dim, embed)
        self.q_experts = nnx.Param(init(rngs.params(), (count, *into)))
        self.o_experts = nnx.Param(init(rngs.params(), (count, *back)))
        zeros = jnp.zeros(embed, param_dtype)
        self.o_bias = nnx.Param(zeros) if config.attention_out_bias else None
        self.o_proj = None

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        segment_ids: Int[Array, "batch seq"] | None,
        window: Window = None,
    ) -> Float[Array, "batch seq embed"]:
        """Routes tokens to experts, attends, and projects back by the same experts.

        Args:
          x: Normed hidden states.
          tables: Tables of the positions.
          segment_ids: Segment of each token in a packed row; None for one segment.
          window: Attention window of this layer; None for the one of all layers.
        """
        routes = self._route(x)
        query, new = self._project_routed(x, tables, routes)
        options = {"segment_ids": segment_ids, **self._score_options(window)}
        return self._back(self.attention(query, *new, **options), routes)

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        cache: KeyValues | IndexedKeyValues,
        slots: Slots,
        window: Window = None,
    ) -> tuple[Float[Array, "batch seq embed"], KeyValues]:
        """Attends from new tokens, which follow those in a cache.

        Args:
          x: Normed hidden states of the new tokens.
          tables: Tables of their positions.
          cache: KV cache of this layer.
          slots: Cache slot of each new token: its position.
          window: Attention window of this layer; None for the one of all layers.

        Returns:
          Attention output, and the cache with the new tokens.
        """
        assert isinstance(cache, KeyValues)
        routes = self._route(x)
        query, new = self._project_routed(x, tables, routes)
        options = self._score_options(window)
        out, cache = attend_cached(query, new, cache, slots, **options)
        return self._back(out, routes), cache

    def _make_projections(
        self, config: DecoderConfig, linear: MakeLinear, param_dtype: DTypeLike
    ) -> None:
        super()._make_projections(config, linear, param_dtype)
        self.q_proj = None

    def _route(self, x: Float[Array, "batch seq embed"]) -> _Routes:
        experts, weights, _ = self.router(x)
        count = self.router.config.num_experts
        chosen = experts.reshape(-1)
        return _Routes(jnp.argsort(chosen), jnp.bincount(chosen, length=count), weights)

    def _project_routed(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        routes: _Routes,
    ) -> tuple[Heads, KeyValues]:
        """Returns queries of the chosen experts next to each other, by key head."""
        batch, seq, embed = x.shape
        rows = jnp.take(x.reshape(-1, embed), routes.order // routes.chosen, axis=0)
        queries = routes.by_token(_multiply(rows, self.q_experts[...], routes))
        queries = queries.reshape(batch, seq, routes.chosen, *queries.shape[1:])
        query = queries.swapaxes(2, 3).reshape(batch, seq, -1, queries.shape[-1])
        key = self._apply_rope(self.k_proj(x), tables)
        assert self.v_proj is not None
        return self._apply_rope(query, tables), KeyValues(key, self.v_proj(x))

    def _back(self, out: Heads, routes: _Routes) -> Float[Array, "batch seq embed"]:
        """Sums the projections back of the experts of each token, by their weights."""
        batch, seq, heads, width = out.shape
        chosen, kernel = routes.chosen, self.o_experts[...]
        pairs = out.reshape(batch, seq, heads // chosen, chosen, width).swapaxes(2, 3)
        rows = pairs.reshape(batch * seq * chosen, -1)
        kernel = kernel.reshape(len(kernel), rows.shape[1], -1)
        made = _multiply(jnp.take(rows, routes.order, axis=0), kernel, routes)
        made = routes.by_token(made).reshape(batch, seq, chosen, -1)
        wide = jnp.promote_types(out.dtype, jnp.float32)
        weights = routes.weights.astype(wide)
        y = jnp.einsum("bsce,bsc->bse", made.astype(wide), weights).astype(out.dtype)
        return (
            y if self.o_bias is None else y + jnp.expand_dims(self.o_bias[...], (0, 1))
        )


def _multiply(
    rows: Rows, kernel: Float[Array, "experts width *out"], routes: _Routes
) -> Rows:
    """Multiplies each sorted row by the matrix of its expert."""
    if not is_split():
        return grouped_matmul(rows, kernel, routes.sizes)
    # XLA splits it over tp, where blocks would each be a collective of their own.
    flat = kernel.reshape(*kernel.shape[:2], -1)
    made = lax.ragged_dot(rows, flat, routes.sizes)
    return made.reshape(len(rows), *kernel.shape[2:])
