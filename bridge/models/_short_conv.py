"""Gated short convolution."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._causal_conv import CausalConv, Mask
from bridge.models._config import DecoderConfig
from bridge.models._layer_state import ConvState
from bridge.models._linear import Linear

Stream = Float[Array, "batch seq embed"]


class ShortConv(nnx.Module):
    """Mixer of a few tokens: `out(after * conv(before * value))`.

    The two gates and the value are projected from each token by one matrix.

    Args:
      config: Config of the decoder, with `short_conv` set.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_lfm2.py::Lfm2ShortConv`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes the projections and the convolution."""
        sizes, embed = config.short_conv, config.hidden_size
        assert sizes is not None
        made = partial(
            Linear,
            bias=sizes.bias,
            std=config.initializer_range,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.in_proj = made((embed,), (3, embed))
        self.conv = CausalConv(
            (embed,),
            sizes.kernel_size,
            bias=sizes.bias,
            std=config.initializer_range,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.out_proj = made((embed,), (embed,))

    def __call__(
        self, x: Stream, segment_ids: Int[Array, "batch seq"] | None
    ) -> Stream:
        """Mixes each token with those before it in its segment."""
        before, after, value = jnp.moveaxis(self.in_proj(x), 2, 0)
        return self.out_proj(after * self.conv(before * value, segment_ids))

    def extend(
        self, x: Stream, state: ConvState, is_token: Mask
    ) -> tuple[Stream, ConvState]:
        """Mixes new tokens with those of a state, and returns the state after them.

        Args:
          x: Normed hidden states of the new tokens.
          state: State before them.
          is_token: False behind the last new token of a row; None if all are tokens.
        """
        before, after, value = jnp.moveaxis(self.in_proj(x), 2, 0)
        mixed, inputs = self.conv.extend(before * value, state.inputs, is_token)
        return self.out_proj(after * mixed), ConvState(inputs)
