"""Projection of groups of heads, each by a matrix of its own."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig


class GroupedProjection(nnx.Module):
    """Projects the outputs of each group of heads to a narrow vector.

    Args:
      config: Config of the decoder, with `compressed_attention`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_deepseek_v4.py::DeepseekV4GroupedLinear`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes a normal kernel of all groups."""
        sizes, heads = config.compressed_attention, config.num_attention_heads
        assert sizes is not None
        self.groups = sizes.o_groups
        each = (heads // sizes.o_groups, config.head_dim, sizes.o_lora_rank)
        init = nnx.initializers.normal(config.initializer_range, dtype=param_dtype)
        self.kernel = nnx.Param(init(rngs.params(), (sizes.o_groups, *each)))

    def __call__(
        self, out: Float[Array, "batch seq heads head_dim"]
    ) -> Float[Array, "batch seq groups o_rank"]:
        """Projects the heads of each group.

        Args:
          out: Outputs of the heads.
        """
        batch, seq, _, width = out.shape
        groups = out.reshape(batch, seq, self.groups, -1, width)
        return jnp.einsum("bsghd,ghdr->bsgr", groups, self.kernel[...])
