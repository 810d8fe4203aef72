"""Multi-head latent attention."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig
from bridge.models._norm import Norm
from bridge.models._position_tables import PositionTables
from bridge.models._scale import scale_by
from bridge.models._self_attention import (
    Heads,
    MakeLinear,
    SelfAttention,
    scale_queries,
)

# transformers uses this for the norms of latent vectors, regardless of the config.
_LATENT_NORM_EPS = 1e-6


class LatentAttention(SelfAttention):
    """Multi-head latent attention: keys and values are projected from a latent vector.

    Attention runs on the full heads. The absorbed form, which saves cache memory in
    generation, is mathematically the same and has no benefit for training.

    Source: transformers `modeling_deepseek_v3.py::DeepseekV3Attention`,
      `modeling_longcat_flash.py::LongcatFlashMLA`,
      `modeling_bailing_hybrid.py::BailingHybridAttention`,
      `modeling_hy_v4.py::HYV4Attention`, for gates.
    """

    def _make_projections(
        self, config: DecoderConfig, linear: MakeLinear, param_dtype: DTypeLike
    ) -> None:
        mla, embed = config.mla, (config.hidden_size,)
        assert mla is not None
        heads, bias = config.num_attention_heads, config.attention_bias
        norm = partial(
            Norm, kind=config.norm, epsilon=_LATENT_NORM_EPS, param_dtype=param_dtype
        )
        if mla.q_lora_rank is None:
            self.q_proj = linear(embed, (heads, mla.qk_head_dim))
        else:
            rank = (mla.q_lora_rank,)
            self.q_a_proj = linear(embed, rank, bias=bias)
            self.q_a_layernorm = norm(rank)
            if mla.gated_queries:
                widths = (heads, mla.qk_head_dim + mla.v_head_dim)
                self.q_gate_proj = linear((2 * mla.q_lora_rank,), widths)
            else:
                self.q_b_proj = linear(rank, (heads, mla.qk_head_dim))
        self.gated_queries, self.qk_head_dim = mla.gated_queries, mla.qk_head_dim
        rank = (mla.kv_lora_rank,)
        width = mla.kv_lora_rank + mla.qk_rope_head_dim
        self.kv_a_proj_with_mqa = linear(embed, (width,), bias=bias)
        self.kv_a_layernorm = norm(rank)
        self.kv_b_proj = linear(rank, (heads, mla.qk_nope_head_dim + mla.v_head_dim))
        self.kv_rank, self.nope_head_dim = mla.kv_lora_rank, mla.qk_nope_head_dim
        width = 1 if config.attention_gate_per_head else mla.v_head_dim
        gated = config.attention_gate
        self.q_gate = linear(embed, (heads, width)) if gated else None
        self.has_q_lora = mla.q_lora_rank is not None
        ranks = (mla.q_lora_rank or config.hidden_size, mla.kv_lora_rank)
        factors = [(config.hidden_size / rank) ** 0.5 for rank in ranks]
        self.latent_scales = factors if mla.scale_latents else [1.0, 1.0]

    def _project(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
    ) -> tuple[Heads, Heads, Heads]:
        return self._project_gated(x, tables)[:3]

    def _project_gated(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
    ) -> tuple[Heads, Heads, Heads, Heads | None]:
        gate = None
        if self.gated_queries:
            query, gate = self._queries_and_gates(x)
        elif self.has_q_lora:
            query = self.q_b_proj(self._query_latent(x))
        else:
            query = self.q_proj(self.constrain(x, "input"))
        query = scale_by(query, self.latent_scales[0])
        query, query_rope = jnp.split(query, [self.nope_head_dim], axis=-1)
        compressed = self.constrain(self.kv_a_proj_with_mqa(x), "tokens")
        latent, key_rope = jnp.split(compressed, [self.kv_rank], axis=-1)
        latent = scale_by(self.kv_a_layernorm(latent), self.latent_scales[1])
        latent = self.constrain(latent, "input")
        key_rope = self.constrain(key_rope, "input")
        key_value = self.kv_b_proj(latent)
        key, value = jnp.split(key_value, [self.nope_head_dim], axis=-1)
        query_rope = self._apply_rope(query_rope, tables)
        key_rope = self._apply_rope(key_rope[:, :, None, :], tables)
        # The rotated part of the key is shared by all heads.
        key_rope = jnp.broadcast_to(key_rope, query_rope.shape)
        return (
            scale_queries(jnp.concatenate([query, query_rope], axis=-1), tables),
            jnp.concatenate([key, key_rope], axis=-1),
            value,
            gate,
        )

    def _queries_and_gates(
        self, x: Float[Array, "batch seq embed"]
    ) -> tuple[Heads, Heads]:
        latent = self.constrain(self.q_a_proj(x), "tokens")
        both = jnp.concatenate([self.q_a_layernorm(latent), latent], axis=-1)
        heads = self.q_gate_proj(self.constrain(both, "input"))
        query, gate = jnp.split(heads, [self.qk_head_dim], axis=-1)
        return query, gate

    def _finish(
        self,
        out: Heads,
        x: Float[Array, "batch seq embed"],
        gate: Heads | None = None,
    ) -> Heads:
        x = x if self.q_gate is None else self.constrain(x, "input")
        return super()._finish(out, x, gate)

    def _query_latent(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq q_rank"]:
        latent = self.constrain(self.q_a_proj(x), "tokens")
        return self.constrain(self.q_a_layernorm(latent), "input")
