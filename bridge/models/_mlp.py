"""Dense MLP and its activations."""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig
from bridge.models._linear import Linear
from bridge.models._multipliers_config import MultipliersConfig
from bridge.models._norm import Norm
from bridge.models._scale import scale_by
from bridge.models._xielu import XIELU

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "sigmoid": jax.nn.sigmoid,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
        "gelu_new": partial(jax.nn.gelu, approximate=True),
        "relu": jax.nn.relu,
        "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    }
)
"""Activations by Hugging Face's names; both with a tanh are the same function there.

`xielu` has parameters, and is a module of its own.
"""


def gated(
    activation: Callable[[Array], Array],
    gate: Array,
    up: Array,
    limit: float | None = None,
    alpha: float | None = None,
) -> Array:
    """Returns the gated values inside an MLP: `activation(gate) * up`.

    Args:
      activation: Function of the gate.
      gate: Values of the gate.
      up: Values that it multiplies.
      limit: Bound on the gate from above, and on `up` from both sides; None for none.
      alpha: Factor in the sigmoid of `(up + 1) * gate * sigmoid(alpha * gate)`, which
        is returned in the place of the above; None for that.

    Source: transformers `modeling_gpt_oss.py::GptOssExperts`,
      `modeling_deepseek_v4.py::DeepseekV4MLP`.
    """
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    if alpha is None:
        return activation(gate) * up
    return (up + 1) * gate * jax.nn.sigmoid(gate * alpha)


class MLP(nnx.Module):
    """Dense MLP: `down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate.

    Args:
      config: Config of the decoder; its `intermediate_size` is not used.
      width: Width of the hidden layer.
      bias: Whether the projections have biases.
      sparsity: Part of the values of the gate that are set to zero, if they are
        normally distributed; None for none.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        config: DecoderConfig,
        width: int,
        *,
        bias: bool,
        sparsity: float | None = None,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        """Initializes two or three projections."""
        embed, inside = (config.hidden_size,), (width,)
        linear = partial(
            Linear,
            bias=bias,
            std=config.initializer_range,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.gate_proj = linear(embed, inside) if config.gated_mlp else None
        self.up_proj = linear(embed, inside)
        self.down_proj = linear(inside, embed)
        norm = None
        if config.inner_norms:
            kind = (config.norm, config.norm_eps)
            norm = Norm(inside, *kind, param_dtype=param_dtype)
        self.inner_norm = norm
        learned = config.hidden_act == "xielu"
        self.xielu = XIELU(param_dtype=param_dtype) if learned else None
        self.activation = config.hidden_act
        self.limit, self.alpha = config.swiglu_limit, config.swiglu_alpha
        self.cut = None
        if sparsity is not None:
            self.cut = statistics.NormalDist().inv_cdf(sparsity)
        self.multipliers = config.multipliers or MultipliersConfig()

    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq embed"]:
        """Applies the MLP to each token."""
        activation = self.xielu or ACTIVATIONS[self.activation]
        if self.gate_proj is None:
            inside = activation(self.up_proj(x))
        else:
            gate = self._largest(scale_by(self.gate_proj(x), self.multipliers.gate))
            inside = gated(activation, gate, self.up_proj(x), self.limit, self.alpha)
        inside = inside if self.inner_norm is None else self.inner_norm(inside)
        return scale_by(self.down_proj(inside), self.multipliers.down)

    def _largest(
        self, gate: Float[Array, "batch seq mlp"]
    ) -> Float[Array, "batch seq mlp"]:
        """Returns by how much values exceed a cut, or zero; all without a cut.

        Source: transformers `modeling_gemma3n.py::Gemma3nTextMLP._gaussian_topk`.
        """
        if self.cut is None:
            return gate
        mean = jnp.mean(gate, axis=-1, keepdims=True)
        deviation = jnp.std(gate, axis=-1, keepdims=True)
        return jax.nn.relu(gate - (mean + scale_by(deviation, self.cut)))
