"""RMS and layer norms with the rounding of each family."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._decoder_fields import Norm as NormKind


class Norm(nnx.Module):
    """RMS norm or layer norm over trailing dims.

    Statistics are float32 for every kind. In float32 the kinds `rms` and `rms_wide`
    are equal; in bfloat16 their last bits differ, as they do between the families.

    Args:
      shape: Shape of the scale, such as `(embed,)` or `(heads, head_dim)`.
      kind: Kind of norm; see `DecoderConfig.norm`.
      epsilon: Epsilon added to the mean square, or variance, under the root.
      scale: Whether the result is multiplied by a scale.
      bias: Whether a bias is added.
      dims: Number of trailing dims over which the mean is taken.
      narrow: Whether the input is first cast to the dtype of the scale.
      param_dtype: Dtype of the parameters.

    Source: transformers `LlamaRMSNorm`, `Olmo2RMSNorm`, `Gemma2RMSNorm`,
      `CohereLayerNorm`, `OlmoLayerNorm`, `NemotronLayerNorm1P`; torch `nn.LayerNorm`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        kind: NormKind,
        epsilon: float,
        *,
        scale: bool = True,
        bias: bool = False,
        dims: int = 1,
        narrow: bool = False,
        param_dtype: DTypeLike,
    ):
        """Initializes the scale to the identity, and the bias to zeros."""
        self.centered = kind.endswith("zero_centered")
        ones = jnp.full(shape, float(not self.centered), param_dtype)
        self.scale = nnx.Param(ones) if scale else None
        self.bias = nnx.Param(jnp.zeros(shape, param_dtype)) if bias else None
        self.kind = kind
        self.epsilon = epsilon
        self.narrow = narrow and scale
        self.axes = tuple(range(-dims, 0))

    def __call__(self, x: Float[Array, "batch seq *dims"]) -> Float[Array, "..."]:
        """Normalizes the trailing dims."""
        if self.narrow and self.scale is not None:
            x = x.astype(self.scale[...].dtype)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.kind.startswith("layer"):
            wide -= jnp.mean(wide, axis=self.axes, keepdims=True)
        variance = jnp.mean(jnp.square(wide), axis=self.axes, keepdims=True)
        wide *= jax.lax.rsqrt(variance + self.epsilon)
        if self.scale is None:
            return wide.astype(x.dtype)
        scale = jnp.expand_dims(self.scale[...], tuple(range(x.ndim - self.scale.ndim)))
        # `rms` rounds before it scales, the other kinds after; see the class.
        if self.kind == "rms":
            return wide.astype(x.dtype) * scale
        scale = scale.astype(wide.dtype)
        wide *= scale + 1 if self.centered else scale
        if self.bias is not None:
            wide += self.bias[...].astype(wide.dtype).reshape(scale.shape)
        return wide.astype(x.dtype)
