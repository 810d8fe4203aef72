"""Norm whose result is scaled by a gate, projected from it through a few dims."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig
from bridge.models._linear import Linear
from bridge.models._norm import Norm


class GatedNorm(Norm):
    """Norm of the residual stream, times a sigmoid of two projections of itself.

    Args:
      config: Config of the decoder, with `norm_gate_rank`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_axk2.py::AXK2GatedRMSNorm`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes the norm, and the projections down and up again."""
        size, rank = (config.hidden_size,), config.norm_gate_rank
        assert rank is not None
        super().__init__(size, config.norm, config.norm_eps, param_dtype=param_dtype)
        linear = partial(
            Linear, std=config.initializer_range, rngs=rngs, param_dtype=param_dtype
        )
        self.gate_down, self.gate_up = linear(size, (rank,)), linear((rank,), size)

    def __call__(self, x: Float[Array, "batch seq *dims"]) -> Float[Array, "..."]:
        """Normalizes the trailing dims, and gates them.

        Args:
          x: Residual stream.
        """
        normed = super().__call__(x)
        gate = self.gate_up(jax.nn.silu(self.gate_down(normed)))
        wide = gate.astype(jnp.promote_types(gate.dtype, jnp.float32))
        return (normed * jax.nn.sigmoid(wide)).astype(normed.dtype)
