"""Decoder layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._attention import Attention, dot_product_attention
from bridge.models._cache import KeyValues, Slots
from bridge.models._config import DecoderConfig
from bridge.models._constrain import Constrain, unconstrained
from bridge.models._layer_kinds import LayerKind
from bridge.models._mlp import MLP
from bridge.models._moe import Dispatch, MoE, sorted_dispatch
from bridge.models._norm import Norm
from bridge.models._router_stats import RouterStats
from bridge.models._self_attention import LatentAttention, SelfAttention

Stream = Float[Array, "batch seq embed"]
PerLayer = dict[str, Int[Array, ""]]
Tables = tuple[Array, Array] | None


class LayerOutput(NamedTuple):
    """Output of a layer.

    Attributes:
      stream: Residual stream.
      router_stats: Statistics of the router; None in a dense layer.
      cache: Cache with the new tokens; None if there was no cache.
    """

    stream: Stream
    router_stats: RouterStats | None
    cache: KeyValues | None


class DecoderLayer(nnx.Module):
    """Decoder layer: attention and MLP, each normed and added to the residual stream.

    Args:
      config: Config of the decoder.
      kind: Kind of the layer.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      attention: Attention function, with the signature of `dot_product_attention`.
      dispatch: Function that runs experts, with the signature of `sorted_dispatch`.
      constrain: Sharding constraint of activations, with the signature of
        `unconstrained`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        kind: LayerKind = LayerKind(),  # noqa: B008 (frozen)
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        attention: Attention = dot_product_attention,
        dispatch: Dispatch = sorted_dispatch,
        constrain: Constrain = unconstrained,
    ):
        """Initializes the weights of one layer, without a layer dim."""
        placement = config.norm_placement
        before, after = placement != "post", placement in ("post", "both")

        def norm() -> Norm:
            return make_norm(config, param_dtype)

        self.input_layernorm = norm() if before else None
        self.self_attn = (LatentAttention if config.mla else SelfAttention)(
            config,
            window=_shared_window(config),
            rngs=rngs,
            param_dtype=param_dtype,
            attention=attention,
            constrain=constrain,
        )
        self.post_attention_layernorm = norm() if after else None
        own = placement in ("pre", "both", "parallel_two")
        self.pre_feedforward_layernorm = norm() if own else None
        self.mlp = (
            MoE(config, rngs=rngs, param_dtype=param_dtype, dispatch=dispatch)
            if kind.channels == "sparse"
            else MLP(
                config,
                config.intermediate_size,
                bias=config.mlp_bias,
                rngs=rngs,
                param_dtype=param_dtype,
            )
        )
        self.post_feedforward_layernorm = norm() if after else None
        self.parallel = placement.startswith("parallel")
        self.multiplier = config.residual_multiplier
        self.is_latent = config.mla is not None
        self.constrain = constrain

    def __call__(
        self,
        x: Stream,
        per_layer: PerLayer | None = None,
        tables: Tables = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        *,
        cache: KeyValues | None = None,
        slots: Slots | None = None,
    ) -> LayerOutput:
        """Adds the outputs of attention and MLP to the residual stream.

        Args:
          x: Residual stream.
          per_layer: Scalars that differ between layers: `window`, the attention window
            in tokens, and `table`, the index of the rotary table.
          tables: Cosines and sines of the positions, stacked if layers differ; None
            if positions are learned.
          segment_ids: Segment of each token in a packed row; None for one segment.
          cache: Keys and values of the previous tokens; None without a cache.
          slots: Slots of the tokens in the cache; None without a cache.
        """
        per_layer = per_layer or {}
        cos, sin = _pick(tables, per_layer.get("table"))
        normed = _apply(self.input_layernorm, x)
        read = self.constrain(normed, "input")
        # Latent attention constrains its latent vectors instead of its input.
        heard = normed if self.is_latent else read
        window = per_layer.get("window")
        if cache is None or slots is None:
            mixed = self.self_attn(heard, cos, sin, segment_ids, window)
        else:
            mixed, cache = self.self_attn.extend(heard, cos, sin, cache, slots, window)
        return LayerOutput(*self._add(x, read, mixed), cache)

    def _add(
        self, x: Stream, read: Stream, mixed: Stream
    ) -> tuple[Stream, RouterStats | None]:
        """Adds the outputs of attention and MLP, in series or parallel."""
        if self.parallel:
            if self.pre_feedforward_layernorm is not None:
                read = self.constrain(self.pre_feedforward_layernorm(x), "input")
            y, stats = self._feedforward(read)
            both = self._scaled(mixed) + self._scaled(y)
            return x + self.constrain(both, "output"), stats
        mixed = self.constrain(mixed, "output")
        x = x + self._scaled(_apply(self.post_attention_layernorm, mixed))
        normed = _apply(self.pre_feedforward_layernorm, x)
        y, stats = self._feedforward(self.constrain(normed, "input"))
        y = self.constrain(y, "output")
        return x + self._scaled(_apply(self.post_feedforward_layernorm, y)), stats

    def _feedforward(self, x: Stream) -> tuple[Stream, RouterStats | None]:
        mlp = self.mlp
        return mlp(x) if isinstance(mlp, MoE) else (mlp(x), None)

    def _scaled(self, y: Stream) -> Stream:
        return scale_by(y, self.multiplier)


def make_norm(config: DecoderConfig, param_dtype: DTypeLike) -> Norm:
    """Returns a norm for the residual stream."""
    return Norm(
        (config.hidden_size,),
        config.norm,
        config.norm_eps,
        scale=config.norm_scale,
        bias=config.norm_bias,
        param_dtype=param_dtype,
    )


def scale_by(x: Array, factor: float) -> Array:
    """Multiplies in float32, so that the factor itself is not rounded to bfloat16."""
    if factor == 1:
        return x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(wide) * factor).astype(x.dtype)


def _shared_window(config: DecoderConfig) -> int | None:
    windows = set(config.windows)
    return windows.pop() if len(windows) == 1 else None


def _apply(norm: Norm | None, x: Stream) -> Stream:
    return x if norm is None else norm(x)


def _pick(tables: Tables, table: Array | None) -> tuple[Array | None, Array | None]:
    if tables is None:
        return None, None
    cos, sin = tables
    if table is None:
        return cos, sin
    picked = [jax.lax.dynamic_index_in_dim(t, table, keepdims=False) for t in tables]
    return picked[0], picked[1]
