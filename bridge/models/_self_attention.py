"""Self-attention with grouped queries."""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._attention import Attention, Window
from bridge.models._cache import Slots, attend_cached
from bridge.models._config import DecoderConfig
from bridge.models._constrain import Constrain
from bridge.models._layer_state import IndexedKeyValues, KeyValues
from bridge.models._linear import Linear
from bridge.models._multipliers_config import MultipliersConfig
from bridge.models._norm import Norm
from bridge.models._position_tables import PositionTables, alibi_slopes
from bridge.models._rope import apply_rope, yarn_mscale
from bridge.models._scale import scale_by

Heads = Float[Array, "batch seq heads head_dim"]
MakeLinear = Callable[..., Linear]

_GATES = MappingProxyType({"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus})
# Upper bound on the chunks of a row: with segment ids below 2**16,
# segment * 2**15 + chunk fits int32.
_MOST_CHUNKS = 2**15


class SelfAttention(nnx.Module):
    """Causal grouped-query self-attention.

    Args:
      config: Config of the decoder.
      window: Attention window in tokens, if all layers share it; else None.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      attention: Attention function, with the signature of `dot_product_attention`.
      constrain: Sharding constraint, applied to latent vectors before they are
        projected to heads.
      shared_key_value: Whether values are the projected keys.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        window: int | None,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        attention: Attention,
        constrain: Constrain,
        shared_key_value: bool = False,
    ):
        """Initializes the projections, norms and sinks of the config."""
        self.shared_key_value = shared_key_value
        heads = config.num_attention_heads
        linear = partial(
            Linear, std=config.initializer_range, rngs=rngs, param_dtype=param_dtype
        )
        self._make_projections(config, linear, param_dtype)
        self.o_proj = linear(
            (heads, config.v_head_dim),
            (config.hidden_size,),
            bias=config.attention_out_bias,
        )
        self.inner_norm = _inner_norm(config, param_dtype)
        self.gate_activation = _GATES[config.attention_gate_activation]
        sinks = jnp.zeros(heads, param_dtype)
        self.sinks = nnx.Param(sinks) if config.attention_sinks else None
        self.attention = attention
        self.constrain = constrain
        self.scale = attention_scale(config)
        self.softcap = config.attn_logit_softcapping
        self.window = window
        self.chunk_size = config.attention_chunk_size
        self.interleaved = config.rope is not None and config.rope.interleaved
        largest = config.alibi_bias_max
        self.slopes = None if largest is None else alibi_slopes(heads, largest)

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        segment_ids: Int[Array, "batch seq"] | None,
        window: Window = None,
    ) -> Float[Array, "batch seq embed"]:
        """Projects to heads, applies rotary embedding, attends, and projects back.

        Args:
          x: Normed hidden states.
          tables: Tables of the positions.
          segment_ids: Segment of each token in a packed row; None for one segment.
          window: Attention window of this layer; None for the one of all layers.
        """
        query, key, value, gate = self._project_gated(x, tables)
        segment_ids = self._in_chunks(segment_ids, tables)
        out = self.attention(
            query, key, value, segment_ids=segment_ids, **self._score_options(window)
        )
        return self.o_proj(self._finish(out, x, gate))

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        cache: KeyValues | IndexedKeyValues,
        slots: Slots,
        window: Window = None,
    ) -> tuple[Float[Array, "batch seq embed"], KeyValues | IndexedKeyValues]:
        """Attends from new tokens, which follow those in a cache.

        Args:
          x: Normed hidden states of the new tokens.
          tables: Tables of their positions.
          cache: KV cache of this layer; with keys of an indexer if it has one.
          slots: Cache slot of each new token: its position.
          window: Attention window of this layer; None for the one of all layers.

        Returns:
          Attention output, and the cache with the new tokens.
        """
        assert isinstance(cache, KeyValues)
        query, key, value, gate = self._project_gated(x, tables)
        new = KeyValues(key, value)
        options = {**self._score_options(window), "first": tables.chunk_start}
        out, cache = attend_cached(query, new, cache, slots, **options)
        return self.o_proj(self._finish(out, x, gate)), cache

    def _project_gated(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
    ) -> tuple[Heads, Heads, Heads, Heads | None]:
        """Projects to heads, and to gates made with the queries; None without."""
        return *self._project(x, tables), None

    def _finish(
        self,
        out: Heads,
        x: Float[Array, "batch seq embed"],
        gate: Heads | None = None,
    ) -> Heads:
        if gate is not None:
            wide = gate.astype(jnp.promote_types(gate.dtype, jnp.float32))
            out = (out * jax.nn.sigmoid(wide)).astype(out.dtype)
        if self.q_gate is not None:
            out = out * self.gate_activation(self.q_gate(x))
        return out if self.inner_norm is None else self.inner_norm(out)

    def _in_chunks(
        self, segment_ids: Int[Array, "batch seq"] | None, tables: PositionTables
    ) -> Int[Array, "batch seq"] | None:
        """Returns the segments, of which each chunk is one of its own."""
        start = tables.chunk_start
        if start is None or segment_ids is None:
            return segment_ids if start is None else start
        assert self.chunk_size is not None
        return segment_ids * _MOST_CHUNKS + start // self.chunk_size

    def _score_options(self, window: Window) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "window": self.window if window is None else window,
            "softcap": self.softcap,
            "sinks": None if self.sinks is None else self.sinks[...],
        }

    def _make_projections(
        self, config: DecoderConfig, linear: MakeLinear, param_dtype: DTypeLike
    ) -> None:
        embed, head_dim = (config.hidden_size,), config.head_dim
        heads = (config.num_attention_heads, head_dim)
        kv_heads = (config.num_key_value_heads, head_dim)
        self.q_proj = linear(embed, heads, bias=config.attention_bias)
        self.k_proj = linear(embed, kv_heads, bias=config.attention_bias)
        value = None
        if not self.shared_key_value:
            values = (config.num_key_value_heads, config.v_head_dim)
            value = linear(embed, values, bias=config.attention_bias)
        self.v_proj = value
        self.v_norm = _value_norm(config, kv_heads, param_dtype)
        gate = None
        if config.attention_gate_per_head:
            gate = linear(embed, (config.num_attention_heads, 1))
        elif config.attention_gate:
            gate = linear(embed, heads, bias=config.attention_bias)
        self.q_gate = gate
        self.q_norm = _head_norm(config, heads, param_dtype)
        self.k_norm = _head_norm(config, kv_heads, param_dtype)
        self.norm_after_rope = config.qk_norm_after_rope
        self.clip = config.clip_qkv
        self.multipliers = config.multipliers or MultipliersConfig()

    def _project(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
    ) -> tuple[Heads, Heads, Heads]:
        query, key = self.q_proj(x), self.k_proj(x)
        value = key if self.v_proj is None else self.v_proj(x)
        value = value if self.v_norm is None else self.v_norm(value)
        value = scale_by(value, self.multipliers.value)
        key = scale_by(key, self.multipliers.key)
        if not self.norm_after_rope:
            query, key = self._norm_heads(query, key, tables)
        if self.clip is not None:
            query, key, value = (
                jnp.clip(heads, -self.clip, self.clip) for heads in (query, key, value)
            )
        query, key = self._apply_rope(query, tables), self._apply_rope(key, tables)
        if self.norm_after_rope:
            query, key = self._norm_heads(query, key, tables)
        query = scale_queries(query, tables)
        return *self._add_distances(query, key, tables), value

    def _norm_heads(
        self, query: Heads, key: Heads, tables: PositionTables
    ) -> tuple[Heads, Heads]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        normed = self.q_norm(query), self.k_norm(key)
        if tables.has_rope is None:
            return normed
        of_query, of_key = (
            jnp.where(tables.has_rope, after, before)
            for after, before in zip(normed, (query, key), strict=True)
        )
        return of_query, of_key

    def _apply_rope(self, heads: Heads, tables: PositionTables) -> Heads:
        if tables.cos is None or tables.sin is None:
            return heads
        return apply_rope(heads, tables.cos, tables.sin, interleaved=self.interleaved)

    def _add_distances(
        self, query: Heads, key: Heads, tables: PositionTables
    ) -> tuple[Heads, Heads]:
        """Adds two dims to each head, whose product is ALiBi's part of the scores.

        A softmax does not see what all keys of a query share, so the position of the
        key alone is as good as the distance.
        """
        if self.slopes is None or tables.steps is None:
            return query, key
        slopes = jnp.asarray(self.slopes, query.dtype)[:, None] / self.scale
        steps = tables.steps.astype(key.dtype)[:, :, None]
        return (
            jnp.concatenate(
                [query, jnp.broadcast_to(slopes, (*query.shape[:-1], 2))], axis=-1
            ),
            jnp.concatenate(
                [key, jnp.broadcast_to(steps, (*key.shape[:-1], 2))], axis=-1
            ),
        )


def attention_scale(config: DecoderConfig) -> float:
    """Returns the factor of the attention scores.

    Source: transformers `modeling_gemma2.py::Gemma2Attention`,
      `modeling_granite.py::GraniteAttention`,
      `modeling_deepseek_v3.py::yarn_apply_mscale`.
    """
    if config.attention_multiplier is not None:
        return config.attention_multiplier
    scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
    if config.mla and config.rope and config.rope.mscale_all_dim and config.rope.factor:
        scale *= yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
    return scale


def scale_queries(query: Heads, tables: PositionTables) -> Heads:
    """Returns queries that grow with their position, where the tables say so."""
    factor = tables.query_scale
    return query if factor is None else query * factor[:, :, None, None]


def _value_norm(
    config: DecoderConfig, heads: tuple[int, int], param_dtype: DTypeLike
) -> Norm | None:
    if not config.value_norm:
        return None
    kind, epsilon = config.norm, config.norm_eps
    return Norm(heads[1:], kind, epsilon, scale=False, param_dtype=param_dtype)


def _inner_norm(config: DecoderConfig, param_dtype: DTypeLike) -> Norm | None:
    if not config.inner_norms:
        return None
    shape = (config.num_attention_heads, config.v_head_dim)
    return Norm(shape, config.norm, config.norm_eps, dims=2, param_dtype=param_dtype)


def _head_norm(
    config: DecoderConfig, heads: tuple[int, int], param_dtype: DTypeLike
) -> Norm | None:
    if config.qk_norm is None:
        return None
    return Norm(
        heads[1:] if config.qk_norm in ("head", "l2") else heads,
        config.norm,
        config.norm_eps,
        scale=config.qk_norm != "l2",
        bias=config.qk_norm_bias,
        dims=2 if config.qk_norm == "full" else 1,
        param_dtype=param_dtype,
    )
