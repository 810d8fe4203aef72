"""Real-gated linear recurrent unit (RG-LRU): a state of one number a channel.

For each token the state of a channel decays by a factor that a gate sets, and adds the
gated input of the channel, scaled so that the state keeps its variance:
`state = a * state + sqrt(1 - a ** 2) * gate * x`. The first token of a text is not
scaled, as it adds to nothing.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float

from bridge.models._causal_conv import CausalConv, Mask
from bridge.models._config import DecoderConfig
from bridge.models._layer_state import RGLRUMemory
from bridge.models._linear import Linear
from bridge.models._mlp import ACTIVATIONS
from bridge.models._recurrent_mixer import Heads, RecurrentMixer, Stream
from bridge.models._selective_scan import begins_segment, combine

_LOG_DECAY = -8.0
"""Logarithm of the decay of a gate of 1 and a softplus of 1."""
_STEEPEST = 1000.0
"""Bound on the slope of the root, which has none at 0."""


class _Inputs(NamedTuple):
    """Projections of the tokens: a gate, and what is convolved."""

    gate: Heads
    x: Heads


class BlockGate(nnx.Module):
    """Sigmoid of a projection of each block of channels to itself.

    Args:
      num_heads: Number of blocks.
      head_dim: Number of channels of a block.
      std: Standard deviation of the initial kernel.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        std: float,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        """Initializes a normal kernel and a zero bias."""
        init = nnx.initializers.normal(std, dtype=param_dtype)
        shape = (num_heads, head_dim, head_dim)
        self.kernel = nnx.Param(init(rngs.params(), shape))
        self.bias = nnx.Param(jnp.zeros(shape[:2], param_dtype))

    def __call__(self, x: Heads) -> Heads:
        """Returns the gate of each channel."""
        y = jnp.einsum("bshi,hio->bsho", x, self.kernel[...])
        return jax.nn.sigmoid(y + jnp.expand_dims(self.bias[...], (0, 1)))


class RGLRU(RecurrentMixer):
    """Mixer of a linear recurrence whose decay and input a gate sets.

    Args:
      config: Config of the decoder, with `rg_lru` set.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_recurrent_gemma.py::RecurrentGemmaRecurrentBlock`,
      `RecurrentGemmaRglru`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes projections, the convolution, gates and decays."""
        sizes, embed = config.rg_lru, (config.hidden_size,)
        assert sizes is not None
        options: dict[str, Any] = {
            "std": config.initializer_range,
            "rngs": rngs,
            "param_dtype": param_dtype,
        }
        linear = partial(Linear, bias=True, **options)
        heads = (sizes.num_heads, sizes.head_dim)
        self.z_proj, self.x_proj = linear(embed, heads), linear(embed, heads)
        self.x_conv = CausalConv(heads, sizes.kernel_size, bias=True, **options)
        self.input_gate = BlockGate(*heads, **options)
        self.decay_gate = BlockGate(*heads, **options)
        # Decays of 0.9 to 0.999 where the gate is 1.
        decay = jnp.linspace(0.9, 0.999, sizes.num_heads * sizes.head_dim)
        softplus = jnp.log(decay) / _LOG_DECAY
        rate = jnp.log(jnp.expm1(softplus)).reshape(heads)
        self.decay_rate = nnx.Param(rate.astype(param_dtype))
        self.o_proj = linear(heads, embed)
        self.activation = config.hidden_act

    def _project(self, x: Stream) -> _Inputs:
        return _Inputs(self.z_proj(x), self.x_proj(x))

    def _convs(self) -> dict[str, CausalConv]:
        return {"x": self.x_conv}

    def _recur(
        self,
        made: _Inputs,
        memory: RGLRUMemory | None,
        segment_ids: Array | None,
        is_token: Mask,
    ) -> tuple[Heads, RGLRUMemory]:
        """Runs the recurrence over convolved inputs, in float32."""
        x = made.x
        wide = jnp.promote_types(x.dtype, jnp.float32)
        begins = _first_tokens(x, memory, segment_ids)[..., None, None]
        rate = jax.nn.softplus(self.decay_rate[...].astype(wide))
        gate = self.decay_gate(x).astype(wide)
        log_decay = _LOG_DECAY * gate * jnp.expand_dims(rate, (0, 1))
        scale = jnp.where(begins, 1, _bounded_root(-jnp.expm1(2 * log_decay)))
        added = scale * (x * self.input_gate(x)).astype(wide)
        decay = jnp.where(begins, 0, jnp.exp(log_decay))
        if is_token is not None:  # Padding changes nothing.
            mask = is_token[..., None, None]
            decay, added = jnp.where(mask, decay, 1), jnp.where(mask, added, 0)
        decays, states = jax.lax.associative_scan(combine, (decay, added), axis=1)
        if memory is not None:
            states += decays * memory.hidden[:, None]
        return states, RGLRUMemory(states[:, -1], _begun(x, memory, is_token))

    def _finish(self, made: _Inputs, out: Heads) -> Stream:
        gate = ACTIVATIONS[self.activation](made.gate)
        return self.o_proj(out.astype(gate.dtype) * gate)


def _first_tokens(
    x: Heads, memory: RGLRUMemory | None, segment_ids: Array | None
) -> Bool[Array, "batch seq"]:
    """Returns which tokens are the first of a text."""
    begins = begins_segment(x, segment_ids)
    first = True if memory is None else ~memory.begun
    return begins.at[:, 0].set(first)


def _begun(x: Heads, memory: RGLRUMemory | None, is_token: Mask) -> Array:
    """Returns which rows have tokens so far; those of a row come first."""
    now = jnp.ones(x.shape[0], jnp.bool_) if is_token is None else is_token[:, 0]
    return now if memory is None else memory.begun | now


def _bounded_root(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Returns the square root, whose gradient is at most `_STEEPEST`."""
    fixed = jax.lax.stop_gradient(x)
    slope = jax.lax.rsqrt(jnp.maximum(4 * fixed, _STEEPEST**-2))
    return jnp.sqrt(fixed) + slope * (x - fixed)
