"""Norms of a mixture of experts that runs beside a dense MLP."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig
from bridge.models._norm import Norm


class MoENorms(nnx.Module):
    """Norms of the inputs of router and experts, and of what is added.

    Args:
      config: Config of the decoder.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_gemma4.py::Gemma4TextRouter`,
      `Gemma4TextDecoderLayer`.
    """

    def __init__(self, config: DecoderConfig, *, param_dtype: DTypeLike):
        """Initializes the scales to the identity."""
        embed = (config.hidden_size,)

        def norm(*, scale: bool = True) -> Norm:
            kind, epsilon = config.norm, config.norm_eps
            return Norm(embed, kind, epsilon, scale=scale, param_dtype=param_dtype)

        self.input, self.output, self.shared = norm(), norm(), norm()
        self.router = norm(scale=False)
        self.router_scale = nnx.Param(jnp.ones(embed, param_dtype))
        self.root = config.hidden_size**-0.5

    def to_router(
        self, stream: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq embed"]:
        """Returns what the router reads of the residual stream."""
        scale = jnp.expand_dims(self.router_scale[...], (0, 1))
        return self.router(stream) * scale * self.root
