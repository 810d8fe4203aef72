"""An activation with two learned slopes."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig


class XIELU(nnx.Module):
    """Activation that is quadratic above 0 and the integral of an ELU below.

    No gradient reaches `beta` and `eps`, which files hold beside the slopes: freeze
    them (`constant_paths`), as weight decay would shrink them nevertheless.

    Args:
      param_dtype: Dtype of the parameters.

    Source: https://arxiv.org/abs/2411.13010; transformers
      `activations.py::XIELUActivation`.
    """

    def __init__(self, *, param_dtype: DTypeLike):
        """Initializes slopes of 0.8 on both sides."""
        beta, slope = 0.5, 0.8
        inverse = jnp.log(jnp.expm1(jnp.asarray([slope, slope - beta])))
        self.alpha_p = nnx.Param(inverse[:1].astype(param_dtype))
        self.alpha_n = nnx.Param(inverse[1:].astype(param_dtype))
        self.beta = nnx.Param(jnp.asarray(beta, param_dtype))
        self.eps = nnx.Param(jnp.asarray(-1e-6, param_dtype))

    def __call__(self, x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        """Applies the activation elementwise."""
        beta, eps = (jax.lax.stop_gradient(p[...]) for p in (self.beta, self.eps))
        positive, negative = (
            jax.nn.softplus(slope[...]).reshape((1,) * x.ndim)
            for slope in (self.alpha_p, self.alpha_n)
        )
        above = positive * x * x
        below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + negative)
        return jnp.where(x > 0, above, below) + beta * x


def activation_constants(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the paths of an activation's constants, which no gradient trains.

    For `FSDPConfig(frozen=...)`; empty for activations without parameters.

    Args:
      config: Config of the decoder.
    """
    if config.hidden_act != "xielu":
        return ()
    return tuple(
        f"{stack.path}.mlp.xielu.{name}"
        for stack in config.layer_stacks
        if stack.kind.channels == "dense"
        for name in ("beta", "eps")
    )
