"""Residual stream of a layer: what an output is added to, and by which factors."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig
from bridge.models._layer_kinds import LayerKind
from bridge.models._scale import scale_by

Stream = Float[Array, "batch seq embed"]


class StreamFactors(nnx.Module):
    """Learned factors of the residual stream, one a dim.

    Args:
      size: Width of the stream.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_doge.py::DogeDecoderLayer`.
    """

    def __init__(self, size: int, param_dtype: DTypeLike):
        """Initializes factors of 1."""
        self.scale = nnx.Param(jnp.ones(size, param_dtype))

    def __call__(self, x: Stream) -> Stream:
        """Returns the stream, multiplied."""
        return x * jnp.expand_dims(self.scale[...], (0, 1))


class Residual(NamedTuple):
    """How the output of a part of a layer is added to the stream.

    Attributes:
      takes_normed: Whether the stream is replaced by its norm before the part reads it.
      stream: Factor of the stream.
      output: Factor of the output.
    """

    takes_normed: bool
    stream: float
    output: float

    def of(self, x: Stream, normed: Stream) -> Stream:
        """Returns the stream that the output is added to.

        Args:
          x: Residual stream.
          normed: Its norm.
        """
        return normed if self.takes_normed else x

    def add(self, x: Stream, y: Stream) -> Stream:
        """Adds an output to the stream.

        Args:
          x: Residual stream.
          y: Output of mixer or MLP.
        """
        return scale_by(x, self.stream) + scale_by(y, self.output)


def residuals(config: DecoderConfig, kind: LayerKind) -> tuple[Residual, Residual]:
    """Returns the residuals of the mixer and of the MLP of layers of a kind.

    Args:
      config: Config of the decoder.
      kind: Kind of the layers.
    """
    normed, output = config.norm_placement == "in_stream", config.residual_multiplier
    factors, lightning = config.residual_factors, config.lightning
    if factors is None:
        return Residual(normed, 1.0, output), Residual(normed, 1.0, output)
    mixer = factors.attention_stream, factors.attention_output
    if kind.mixer == "lightning" and lightning is not None:
        mixer = lightning.stream_factor, lightning.output_factor
    mlp = factors.mlp_stream, factors.mlp_output
    return Residual(normed, *mixer), Residual(normed, *mlp)
