"""Lightning attention: linear attention with a fixed decay of each head and layer."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._causal_conv import Mask
from bridge.models._config import DecoderConfig
from bridge.models._layer_state import LightningState
from bridge.models._linear import Linear
from bridge.models._mlp import ACTIVATIONS
from bridge.models._norm import Norm
from bridge.models._recurrent_mixer import Heads, Stream
from bridge.models._state_space import state_space

Slopes = Float[Array, "1 1 heads"]

# transformers norms with this, regardless of the config.
_NORM_EPS = 1e-6
_CHUNK = 128


class _Inputs(NamedTuple):
    """Projections of the tokens."""

    query: Heads
    key: Heads
    value: Heads
    gate: Heads


class LightningAttention(nnx.Module):
    """Linear attention: each token decays a state of each head, and adds to it.

    Args:
      config: Config of the decoder, with `lightning` set.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: Lightning Attention-2, https://arxiv.org/abs/2401.04658; transformers
      `modeling_minimax.py::MiniMaxLightningAttention`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes projections and the norm of all heads."""
        embed, heads = (
            (config.hidden_size,),
            (
                config.num_attention_heads,
                config.head_dim,
            ),
        )
        linear = partial(
            Linear, std=config.initializer_range, rngs=rngs, param_dtype=param_dtype
        )
        self.q_proj, self.k_proj = linear(embed, heads), linear(embed, heads)
        self.v_proj, self.z_proj = linear(embed, heads), linear(embed, heads)
        self.norm = Norm(heads, config.norm, _NORM_EPS, dims=2, param_dtype=param_dtype)
        self.o_proj = linear(heads, embed)
        self.activation = config.hidden_act

    def in_layer(self, slopes: Slopes) -> "LayerLightning":
        """Returns the mixer with the decays of its layer.

        Args:
          slopes: Negated logarithms of the decays.
        """
        return LayerLightning(self, slopes)

    def project(self, x: Stream) -> _Inputs:
        """Returns the projections of tokens.

        Args:
          x: Normed hidden states.
        """
        activation = ACTIVATIONS[self.activation]
        query, key, value = (
            activation(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        return _Inputs(query, key, value, self.z_proj(x))

    def finish(self, made: _Inputs, out: Heads) -> Stream:
        """Norms, gates and projects what queries read.

        Args:
          made: Projections of the tokens.
          out: What they read.
        """
        normed = self.norm(out.astype(made.gate.dtype))
        return self.o_proj(jax.nn.sigmoid(made.gate) * normed)


@dataclasses.dataclass(frozen=True)
class LayerLightning:
    """Lightning attention with the decays of a layer.

    Args:
      mixer: Projections and norm.
      slopes: Negated logarithms of the decays.
    """

    mixer: LightningAttention
    slopes: Slopes

    def __call__(
        self, x: Stream, segment_ids: Int[Array, "batch seq"] | None
    ) -> Stream:
        """Mixes each token with those before it in its segment."""
        made = self.mixer.project(x)
        out, _ = self._recur(made, None, segment_ids, None)
        return self.mixer.finish(made, out)

    def extend(self, x: Stream, state: Any, is_token: Mask) -> tuple[Stream, Any]:
        """Mixes new tokens with those of a state, and returns the state after them.

        Args:
          x: Normed hidden states of the new tokens.
          state: State before them.
          is_token: False behind the last new token of a row; None if all are tokens.
        """
        made = self.mixer.project(x)
        out, memory = self._recur(made, state.memory, None, is_token)
        return self.mixer.finish(made, out), LightningState(memory)

    def _recur(
        self,
        made: _Inputs,
        memory: Array | None,
        segment_ids: Array | None,
        is_token: Mask,
    ) -> tuple[Heads, Array]:
        key, shape = made.key, made.key.shape[:3]
        wide = jnp.promote_types(key.dtype, jnp.float32)
        log_decay = jnp.broadcast_to(-self.slopes.astype(wide), shape)
        if is_token is not None:  # Padding changes nothing.
            key = jnp.where(is_token[..., None, None], key, 0)
            log_decay = jnp.where(is_token[..., None], log_decay, 0)
        return state_space(
            made.value,
            key,
            made.query,
            log_decay,
            memory,
            segment_ids,
            chunk_size=_CHUNK,
        )


def lightning_slopes(config: DecoderConfig) -> Float[np.ndarray, "layers 1 1 heads"]:
    """Returns the negated logarithm of the decay of each head in each layer.

    Args:
      config: Config of the decoder.

    Source: transformers `modeling_minimax.py::MiniMaxLightningAttention`.
    """
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    of_heads = 2.0 ** (-8 / heads * np.arange(1, heads + 1))
    of_layers = 1 - np.arange(layers) / (layers - 1 + 1e-5) + 1e-5
    slopes = of_layers[:, None] * of_heads
    return slopes[:, None, None].astype(np.float32)
