"""Several residual streams that attention and MLP mix (hyper-connections)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig
from bridge.models._hyper_connections_config import HyperConnectionsConfig

Stream = Float[Array, "batch seq embed"]
Streams = Float[Array, "batch seq streams embed"]


class StreamMix(NamedTuple):
    """How the output of a part of a layer becomes the streams behind it.

    Attributes:
      expand: Weight of the output in each stream.
      mix: Weight of each stream before, in each stream behind; rows and columns sum
        to 1. None for streams that stay what they are.
    """

    expand: Float[Array, "batch seq streams"]
    mix: Float[Array, "batch seq streams_in streams_out"] | None

    def add(self, streams: Streams, output: Stream) -> Streams:
        """Returns the streams behind a part of a layer.

        Args:
          streams: Streams before it.
          output: Output of the part.
        """
        if self.mix is None:  # added at least in float32
            added = self.expand[..., None] * output[:, :, None]
            return (streams + added).astype(streams.dtype)
        mix, expand = self.mix.astype(streams.dtype), self.expand.astype(streams.dtype)
        mixed = jnp.einsum("bsij,bsie->bsje", mix, streams)
        return mixed + expand[..., None] * output[:, :, None]


class HyperConnection(nnx.Module):
    """Reads the streams for attention or MLP, and tells how to add its output.

    All weights of the streams are projected from all streams of the token, and computed
    at least in float32.

    Args:
      config: Config of the decoder, with `hyper_connections`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: mHC (arXiv:2512.24880); transformers
      `modeling_deepseek_v4.py::DeepseekV4HyperConnection`,
      `modeling_hy_v4.py::HYV4HyperConnection`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes the projection, its bias, and a factor of each kind of weight."""
        assert config.hyper_connections is not None
        self.sizes = config.hyper_connections
        count = self.sizes.num_streams
        width, factors = count * (2 + count), 3
        if self.sizes.independent:
            width, factors = count * 2, 2
        self.projection = _StreamProjection(
            config, width, factors, rngs=rngs, param_dtype=param_dtype
        )

    def __call__(self, streams: Streams) -> tuple[Stream, StreamMix]:
        """Returns the input of a part of a layer, and how to add its output.

        Args:
          streams: Residual streams before it.
        """
        count, eps = self.sizes.num_streams, self.sizes.eps
        read, expand, mix = jnp.split(
            self.projection(streams), [count, 2 * count], axis=-1
        )
        scale, base = self.projection.scale[...], self.projection.base[...]
        of_read, of_expand, of_mix = jnp.split(
            jnp.expand_dims(base, (0, 1)), [count, 2 * count], axis=-1
        )
        read = jax.nn.sigmoid(read * scale[0] + of_read) + eps
        expand = jax.nn.sigmoid(expand * scale[1] + of_expand)
        expand = self.sizes.expand_factor * expand
        if self.sizes.independent:
            return _sum(streams, read), StreamMix(expand + eps, None)
        mix = (mix * scale[2] + of_mix).reshape(*mix.shape[:-1], count, count)
        mix = _doubly_stochastic(mix, self.sizes)
        return _sum(streams, read), StreamMix(expand, mix)


class StreamEnds(nnx.Module):
    """Makes the streams of one before the first layer, and one of all behind the last.

    Args:
      config: Config of the decoder, with `hyper_connections`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_deepseek_v4.py::DeepseekV4HyperHead`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes the projection, its bias and its factor."""
        assert config.hyper_connections is not None
        self.sizes = config.hyper_connections
        self.projection = _StreamProjection(
            config, self.sizes.num_streams, 1, rngs=rngs, param_dtype=param_dtype
        )

    def split(self, x: Stream) -> Streams:
        """Returns the streams before the first layer, which are equal.

        Args:
          x: Embeddings of the tokens.
        """
        batch, seq, embed = x.shape
        shape = (batch, seq, self.sizes.num_streams, embed)
        return jnp.broadcast_to(x[:, :, None], shape)

    def shown(
        self, states: Float[Array, "layers batch seq streams embed"]
    ) -> Float[Array, "layers batch seq embed"]:
        """Returns what stands for the streams behind each layer: their mean.

        Args:
          states: Residual streams behind each layer.
        """
        return jnp.mean(states, axis=-2)

    def join(self, streams: Streams) -> Stream:
        """Returns the weighted sum of the streams.

        Args:
          streams: Residual streams behind the last layer.
        """
        scale, base = self.projection.scale[...], self.projection.base[...]
        read = self.projection(streams) * scale[0] + jnp.expand_dims(base, (0, 1))
        return _sum(streams, jax.nn.sigmoid(read) + self.sizes.eps)


class _StreamProjection(nnx.Module):
    """Projection of all streams of a token, normed as one vector without a scale."""

    def __init__(
        self,
        config: DecoderConfig,
        width: int,
        factors: int,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        sizes = config.hyper_connections
        assert sizes is not None
        init = nnx.initializers.normal(config.initializer_range, dtype=param_dtype)
        shape = (sizes.num_streams, config.hidden_size, width)
        self.kernel = nnx.Param(init(rngs.params(), shape))
        # Of independent streams about one is read at first, and outputs go to all.
        read = -math.log(max(sizes.num_streams - 1, 1)) if sizes.independent else 0.0
        base = jnp.zeros(width, param_dtype).at[: sizes.num_streams].set(read)
        self.base = nnx.Param(base)
        factor = 0.01 if sizes.independent else 1.0
        self.scale = nnx.Param(jnp.full(factors, factor, param_dtype))
        self.norm_eps = config.norm_eps

    def __call__(self, streams: Streams) -> Float[Array, "batch seq width"]:
        wide = streams.astype(jnp.promote_types(streams.dtype, jnp.float32))
        square = jnp.mean(jnp.square(wide), axis=(-2, -1), keepdims=True)
        normed = wide * jax.lax.rsqrt(square + self.norm_eps)
        kernel = self.kernel[...].astype(wide.dtype)
        return jnp.einsum("bsne,new->bsw", normed, kernel)


def _sum(streams: Streams, weights: Float[Array, "batch seq streams"]) -> Stream:
    """Returns the weighted sum of the streams, added at least in float32."""
    summed = jnp.einsum("bsn,bsne->bse", weights, streams.astype(weights.dtype))
    return summed.astype(streams.dtype)


def _doubly_stochastic(
    logits: Float[Array, "batch seq streams_in streams_out"],
    sizes: HyperConnectionsConfig,
) -> Float[Array, "batch seq streams_in streams_out"]:
    """Returns matrices whose rows and columns sum to 1 (Sinkhorn-Knopp)."""

    def normalize(matrix: Array, axis: int) -> Array:
        return matrix / (matrix.sum(axis=axis, keepdims=True) + sizes.eps)

    def iterate(matrix: Array, _: None) -> tuple[Array, None]:
        return normalize(normalize(matrix, -1), -2), None

    first = normalize(jax.nn.softmax(logits, axis=-1) + sizes.eps, -2)
    return jax.lax.scan(iterate, first, length=sizes.sinkhorn_iters - 1)[0]
