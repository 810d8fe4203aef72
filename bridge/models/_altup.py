"""Several residual streams, of which each layer computes one (AltUp)."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig
from bridge.models._linear import Linear
from bridge.models._norm import Norm
from bridge.models._scale import scale_by

Streams = Float[Array, "batch seq streams embed"]

# Below it, the mean square of a projected stream counts as this.
_LEAST_SQUARE = 1e-5


class AltUp(nnx.Module):
    """Part of a layer that predicts all streams, and corrects them by the active one.

    Coefficients are not bounded, as in transformers outside of training.

    Args:
      config: Config of the decoder, with `altup`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_gemma3n.py::Gemma3nTextAltUp`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes the router, the coefficients and the scale of the output."""
        assert config.altup is not None
        count, embed = (config.altup.num_streams,), (config.hidden_size,)
        linear = partial(
            Linear, std=config.initializer_range, rngs=rngs, param_dtype=param_dtype
        )
        self.router_norm = Norm(
            embed, config.norm, config.norm_eps, param_dtype=param_dtype
        )
        self.router = linear(embed, count)
        self.prediction = linear(count, count + count)
        self.correction = linear(count, count)
        self.output_scale = nnx.Param(jnp.zeros(embed, param_dtype))
        self.active = config.altup.active

    def predict(self, streams: Streams) -> Streams:
        """Returns the streams that the active one of a layer is expected to give.

        Args:
          streams: Residual streams before the layer.
        """
        of_active = self._modalities(streams[:, :, self.active])
        factors = self.prediction(of_active)
        return jnp.einsum("bsie,bsji->bsje", streams, factors) + streams

    def correct(
        self, predicted: Streams, computed: Float[Array, "batch seq embed"]
    ) -> Streams:
        """Returns all streams, corrected by what the layer computed.

        Args:
          predicted: Predicted streams.
          computed: Active stream behind the layer.
        """
        news = computed - predicted[:, :, self.active]
        factors = self.correction(self._modalities(computed)) + 1
        return predicted + factors[..., None] * news[:, :, None]

    def scaled(self, streams: Streams) -> Float[Array, "batch seq embed"]:
        """Returns the active stream, scaled, from which a layer gates its input.

        Args:
          streams: Corrected streams.
        """
        return streams[:, :, self.active] * jnp.expand_dims(
            self.output_scale[...], (0, 1)
        )

    def _modalities(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq streams"]:
        routed = self.router(scale_by(self.router_norm(x), 1 / x.shape[-1]))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.tanh(routed.astype(wide)).astype(x.dtype)


class StreamProjections(nnx.Module):
    """Makes streams of one before the first layer, and one of all behind the last.

    Each projection has the magnitude of the active stream.

    Args:
      config: Config of the decoder, with `altup`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_gemma3n.py::Gemma3nTextModel`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes two matrices for each stream but the first."""
        assert config.altup is not None
        self.active = config.altup.active
        shape = (config.altup.num_streams - 1, *(config.hidden_size,) * 2)
        init = nnx.initializers.normal(config.initializer_range, dtype=param_dtype)
        self.apart = nnx.Param(init(rngs.params(), shape))
        self.together = nnx.Param(init(rngs.params(), shape))

    def split(self, x: Float[Array, "batch seq embed"]) -> Streams:
        """Returns the streams before the first layer.

        Args:
          x: Embeddings of the tokens.
        """
        others = jnp.einsum("bse,pef->bspf", x, self.apart[...])
        return _with_magnitude_of_first(x, others)

    def shown(
        self, states: Float[Array, "layers batch seq streams embed"]
    ) -> Float[Array, "layers batch seq embed"]:
        """Returns what stands for the streams behind each layer: the active one.

        Args:
          states: Residual streams behind each layer.
        """
        return states[..., self.active, :]

    def join(self, streams: Streams) -> Float[Array, "batch seq embed"]:
        """Returns the mean of the projected streams.

        Args:
          streams: Residual streams behind the last layer.
        """
        others = jnp.einsum("bspe,pef->bspf", streams[:, :, 1:], self.together[...])
        return jnp.mean(_with_magnitude_of_first(streams[:, :, 0], others), axis=2)


def _with_magnitude_of_first(
    first: Float[Array, "batch seq embed"],
    others: Float[Array, "batch seq others embed"],
) -> Streams:
    """Returns the first stream beside the others, as large as the first is."""
    first = first[:, :, None]
    wanted = jnp.sqrt(jnp.mean(jnp.square(first), axis=-1, keepdims=True))
    square = jnp.mean(jnp.square(others), axis=-1, keepdims=True)
    found = jnp.sqrt(jnp.maximum(square, _LEAST_SQUARE))
    return jnp.concatenate([first, others * wanted / found], axis=2)
