"""Causal depthwise convolution over a few tokens, with the tokens before as state."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Int

Mask = Bool[Array, "batch seq"] | None


class CausalConv(nnx.Module):
    """Depthwise convolution: each channel sees its own last tokens.

    Args:
      channels: Dims of the channels, such as `(embed,)` or `(heads, head_dim)`.
      kernel_size: Number of tokens that a token sees, including itself.
      bias: Whether a bias is added.
      std: Standard deviation of the initial kernel.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        channels: tuple[int, ...],
        kernel_size: int,
        *,
        bias: bool,
        std: float,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        """Initializes a normal kernel and, with `bias`, a zero bias."""
        init = nnx.initializers.normal(std, dtype=param_dtype)
        self.kernel = nnx.Param(init(rngs.params(), (*channels, kernel_size)))
        self.bias = nnx.Param(jnp.zeros(channels, param_dtype)) if bias else None

    def __call__(
        self,
        x: Float[Array, "batch seq *channels"],
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq *channels"]:
        """Sums over the last tokens of each token's segment.

        Args:
          x: Inputs.
          segment_ids: Segment of each token in a packed row; None for one segment.
        """
        kernel = self.kernel[...]
        before = kernel.shape[-1] - 1
        padded = _pad_front(x, before)
        ids = None if segment_ids is None else _pad_front(segment_ids, before, -1)
        return self._sum(padded, ids)

    def extend(
        self,
        x: Float[Array, "batch seq *channels"],
        state: Float[Array, "batch before *channels"],
        is_token: Mask,
    ) -> tuple[Float[Array, "batch seq *channels"], Float[Array, "..."]]:
        """Convolves new tokens that follow those of a state.

        Args:
          x: Inputs of the new tokens.
          state: Inputs of the last tokens before them, zeros before the first.
          is_token: False behind the last new token of a row; None if all are tokens.

        Returns:
          Outputs, and the inputs of the last tokens including the new ones.
        """
        padded = jnp.concatenate([state.astype(x.dtype), x], axis=1)
        return self._sum(padded, None), _last(padded, state.shape[1], is_token)

    def _sum(self, padded: Array, ids: Array | None) -> Array:
        kernel = self.kernel[...]
        size = kernel.shape[-1]
        seq = padded.shape[1] - size + 1
        wide = jnp.promote_types(padded.dtype, jnp.float32)
        total = jnp.zeros((), wide)
        for at in range(size):
            tap = jnp.expand_dims(kernel[..., at].astype(wide), (0, 1))
            term = padded[:, at : at + seq].astype(wide) * tap
            if ids is not None:
                same = ids[:, at : at + seq] == ids[:, size - 1 :]
                term *= same.reshape(*same.shape, *(1,) * (term.ndim - 2))
            total += term
        if self.bias is not None:
            total += jnp.expand_dims(self.bias[...].astype(wide), (0, 1))
        return total.astype(padded.dtype)


def _pad_front(x: Array, count: int, value: int = 0) -> Array:
    widths = [(0, 0), (count, 0), *((0, 0) for _ in x.shape[2:])]
    return jnp.pad(x, widths, constant_values=value)


def _last(padded: Array, count: int, is_token: Mask) -> Array:
    """Returns the last inputs of each row, which end where its tokens do."""
    if is_token is None:
        return padded[:, padded.shape[1] - count :]
    # `padded` begins with as many inputs as are wanted.
    at = is_token.sum(1)[:, None] + jnp.arange(count)[None]
    return jnp.take_along_axis(
        padded, at.reshape(*at.shape, *(1,) * (padded.ndim - 2)), axis=1
    )
