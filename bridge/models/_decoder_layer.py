"""Decoder layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._attention import Attention, dot_product_attention
from bridge.models._cache import Slots
from bridge.models._causal_conv import Mask
from bridge.models._config import DecoderConfig
from bridge.models._constrain import Constrain, unconstrained
from bridge.models._delta_net import DeltaNet
from bridge.models._layer_kinds import DENSE_ATTENTION, LayerKind
from bridge.models._layer_state import KeyValues, LayerState
from bridge.models._mamba import Mamba
from bridge.models._mlp import MLP
from bridge.models._moe import Dispatch, MoE, Routed, sorted_dispatch
from bridge.models._norm import Norm
from bridge.models._router_stats import RouterStats
from bridge.models._self_attention import LatentAttention, SelfAttention
from bridge.models._short_conv import ShortConv

Stream = Float[Array, "batch seq embed"]
Experts = Int[Array, "batch seq chosen"]
PerLayer = dict[str, Int[Array, "..."]]
Tables = tuple[Array, Array] | None


# Mixers but attention, and the attribute of a layer that holds each.
_MIXERS = {"short_conv": ShortConv, "delta_net": DeltaNet, "mamba": Mamba}
_NAMES = {"attention": "self_attn", **{name: name for name in _MIXERS}}


class LayerOutput(NamedTuple):
    """Output of a layer.

    Attributes:
      stream: Residual stream.
      router_stats: Statistics of the router; None in a dense layer.
      cache: Cache with the new tokens; None if there was no cache.
      experts: Experts of each token; None in a dense layer.
    """

    stream: Stream
    router_stats: RouterStats | None
    cache: LayerState | None
    experts: Experts | None


class DecoderLayer(nnx.Module):
    """Decoder layer: mixer and MLP, each normed and added to the residual stream.

    The mixer is `self_attn`, `short_conv`, `delta_net` or `mamba`, by the layer's kind.

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
        kind: LayerKind = DENSE_ATTENTION,
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

        mixes, feeds = kind.mixer is not None, kind.channels is not None
        self.input_layernorm = norm() if before and mixes else None
        self.mixer_name = None if kind.mixer is None else _NAMES[kind.mixer]
        if kind.mixer == "attention":
            self.self_attn = _make_attention(
                config, rngs, param_dtype, attention, constrain
            )
        elif kind.mixer is not None:
            mixer = _MIXERS[kind.mixer](config, rngs=rngs, param_dtype=param_dtype)
            setattr(self, kind.mixer, mixer)
        self.post_attention_layernorm = norm() if after else None
        own = placement in ("pre", "both", "parallel_two")
        self.pre_feedforward_layernorm = norm() if own and feeds else None
        self.mlp = _make_channels(config, kind, rngs, param_dtype, dispatch)
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
        cache: LayerState | None = None,
        slots: Slots | None = None,
        is_token: Mask = None,
    ) -> LayerOutput:
        """Adds the outputs of mixer and MLP to the residual stream.

        Args:
          x: Residual stream.
          per_layer: Inputs that differ between layers: `window`, the attention window
            in tokens, `table`, the index of the rotary table, and `experts`, those of
            each token if the router is not to choose them.
          tables: Cosines and sines of the positions, stacked if layers differ; None
            if positions are learned.
          segment_ids: Segment of each token in a packed row; None for one segment.
          cache: Cache of the previous tokens; None without a cache.
          slots: Slots of the tokens in the cache; None without a cache.
          is_token: False behind the last token of a row; None if all are tokens. Read
            by mixers with a state alone.
        """
        per_layer = per_layer or {}
        experts = per_layer.get("experts")
        if self.mixer_name is None:
            return _output(*self._feed(x, experts), cache)
        normed = _apply(self.input_layernorm, x)
        read = self.constrain(normed, "input")
        # Latent attention constrains its latent vectors instead of its input.
        heard = normed if self.is_latent else read
        mixer = getattr(self, self.mixer_name)
        if not isinstance(mixer, SelfAttention):
            if cache is None:
                mixed = mixer(read, segment_ids)
            else:
                mixed, cache = mixer.extend(read, cache, is_token)
            return _output(*self._add(x, read, mixed, experts), cache)
        window = per_layer.get("window")
        cos, sin = _pick(tables, per_layer.get("table"))
        if isinstance(cache, KeyValues) and slots is not None:
            mixed, cache = mixer.extend(heard, cos, sin, cache, slots, window)
        else:
            mixed = mixer(heard, cos, sin, segment_ids, window)
        return _output(*self._add(x, read, mixed, experts), cache)

    def _add(
        self, x: Stream, read: Stream, mixed: Stream, experts: Experts | None
    ) -> tuple[Stream, Routed | None]:
        """Adds the outputs of attention and MLP, in series or parallel."""
        if self.parallel:
            if self.pre_feedforward_layernorm is not None:
                read = self.constrain(self.pre_feedforward_layernorm(x), "input")
            y, routed = self._feedforward(read, experts)
            both = self._scaled(mixed) + self._scaled(y)
            return x + self.constrain(both, "output"), routed
        mixed = self.constrain(mixed, "output")
        return self._feed(
            x + self._scaled(_apply(self.post_attention_layernorm, mixed)), experts
        )

    def _feed(self, x: Stream, experts: Experts | None) -> tuple[Stream, Routed | None]:
        """Adds the output of the MLP, if there is one."""
        if self.mlp is None:
            return x, None
        normed = _apply(self.pre_feedforward_layernorm, x)
        y, routed = self._feedforward(self.constrain(normed, "input"), experts)
        y = self.constrain(y, "output")
        return x + self._scaled(_apply(self.post_feedforward_layernorm, y)), routed

    def _feedforward(
        self, x: Stream, experts: Experts | None
    ) -> tuple[Stream, Routed | None]:
        mlp = self.mlp
        assert mlp is not None
        return mlp(x, experts) if isinstance(mlp, MoE) else (mlp(x), None)

    def _scaled(self, y: Stream) -> Stream:
        return scale_by(y, self.multiplier)


def _output(
    stream: Stream, routed: Routed | None, cache: LayerState | None
) -> LayerOutput:
    stats, experts = (None, None) if routed is None else routed
    return LayerOutput(stream, stats, cache, experts)


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


def _make_attention(
    config: DecoderConfig,
    rngs: nnx.Rngs,
    param_dtype: DTypeLike,
    attention: Attention,
    constrain: Constrain,
) -> SelfAttention:
    return (LatentAttention if config.mla else SelfAttention)(
        config,
        window=_shared_window(config),
        rngs=rngs,
        param_dtype=param_dtype,
        attention=attention,
        constrain=constrain,
    )


def _make_channels(
    config: DecoderConfig,
    kind: LayerKind,
    rngs: nnx.Rngs,
    param_dtype: DTypeLike,
    dispatch: Dispatch,
) -> MLP | MoE | None:
    if kind.channels is None:
        return None
    if kind.channels == "sparse":
        return MoE(config, rngs=rngs, param_dtype=param_dtype, dispatch=dispatch)
    return MLP(
        config,
        config.intermediate_size,
        bias=config.mlp_bias,
        rngs=rngs,
        param_dtype=param_dtype,
    )


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
