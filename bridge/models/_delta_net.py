"""Gated delta net: linear attention with a state that forgets and corrects."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._causal_conv import CausalConv, Mask
from bridge.models._config import DecoderConfig
from bridge.models._delta_rule import gated_delta_rule
from bridge.models._linear import Linear
from bridge.models._mlp import ACTIVATIONS
from bridge.models._norm import Norm
from bridge.models._recurrent_mixer import Heads, RecurrentMixer, Stream
from bridge.models._scale import scale_by

# transformers adds this under the root of the length, regardless of the config.
_LENGTH_EPS = 1e-6


class _Inputs(NamedTuple):
    """Projections of the tokens: three to convolve, a gate, and two scalars a head.

    The second may be one of each dim of a key head.
    """

    query: Heads
    key: Heads
    value: Heads
    gate: Heads
    beta: Float[Array, "batch seq heads"]
    step: Float[Array, "batch seq heads *key_dim"]


class DeltaNet(RecurrentMixer):
    """Mixer whose state of each head learns values by keys, and is read by queries.

    Args:
      config: Config of the decoder, with `delta_net` set.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_qwen3_next.py::Qwen3NextGatedDeltaNet`,
      `modeling_kimi_linear.py::KimiLinearDeltaAttention`,
      `modeling_bailing_hybrid.py::BailingHybridDeltaAttention`,
      `modeling_olmo_hybrid.py::OlmoHybridGatedDeltaNet`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes projections, convolutions, decays and the norm."""
        sizes, embed = config.delta_net, (config.hidden_size,)
        assert sizes is not None
        options: dict[str, Any] = {
            "std": config.initializer_range,
            "rngs": rngs,
            "param_dtype": param_dtype,
        }
        linear = partial(Linear, **options)
        keys = (sizes.num_key_heads, sizes.key_head_dim)
        values = (sizes.num_value_heads, sizes.value_head_dim)
        heads = (sizes.num_value_heads,)
        self.q_proj = linear(embed, keys)
        self.k_proj = linear(embed, keys)
        self.v_proj = linear(embed, values)
        self.b_proj = linear(embed, heads)
        rank, steps = sizes.gate_rank, keys if sizes.decay_by_dim else heads
        self.z_down = None if rank is None else linear(embed, (rank,))
        self.z_proj = linear(embed if rank is None else (rank,), values)
        rank = sizes.decay_rank
        self.a_down = None if rank is None else linear(embed, (rank,))
        self.a_proj = linear(embed if rank is None else (rank,), steps)
        conv = partial(CausalConv, kernel_size=sizes.kernel_size, bias=False, **options)
        self.q_conv, self.k_conv, self.v_conv = conv(keys), conv(keys), conv(values)
        self.a_log = nnx.Param(jnp.zeros(heads, param_dtype))
        self.dt_bias = nnx.Param(jnp.ones(steps, param_dtype))
        self.by_dim, self.bound = sizes.decay_by_dim, sizes.decay_bound
        self.gate_activation = sizes.gate_activation
        self.beta_factor = sizes.beta_factor
        eps = config.norm_eps if sizes.norm_eps is None else sizes.norm_eps
        self.norm = Norm(values[1:], "rms", eps, param_dtype=param_dtype)
        self.o_proj = linear(values, embed)

    def _project(self, x: Stream) -> _Inputs:
        return _Inputs(
            self.q_proj(x),
            self.k_proj(x),
            self.v_proj(x),
            self.z_proj(x if self.z_down is None else self.z_down(x)),
            self.b_proj(x),
            self.a_proj(x if self.a_down is None else self.a_down(x)),
        )

    def _convs(self) -> dict[str, CausalConv]:
        return {"query": self.q_conv, "key": self.k_conv, "value": self.v_conv}

    def _recur(
        self,
        made: _Inputs,
        memory: Array | None,
        segment_ids: Array | None,
        is_token: Mask,
    ) -> tuple[Heads, Array]:
        """Runs the delta rule over convolved inputs."""
        dtype = made.query.dtype
        wide = jnp.promote_types(dtype, jnp.float32)
        query, key, value = (
            jax.nn.silu(part).astype(wide)
            for part in (made.query, made.key, made.value)
        )
        times = value.shape[2] // key.shape[2]
        query = jnp.repeat(_unit(query) * query.shape[-1] ** -0.5, times, axis=2)
        key = jnp.repeat(_unit(key), times, axis=2)
        beta = scale_by(jax.nn.sigmoid(made.beta), self.beta_factor).astype(wide)
        log_decay = self._log_decay(made.step.astype(wide))
        if is_token is not None:  # Padding changes nothing.
            beta = jnp.where(is_token[..., None], beta, 0)
            seen = jnp.expand_dims(is_token, tuple(range(2, log_decay.ndim)))
            log_decay = jnp.where(seen, log_decay, 0)
        out, memory = gated_delta_rule(
            query, key, value, log_decay, beta, memory, segment_ids
        )
        return out.astype(dtype), memory

    def _log_decay(
        self, step: Float[Array, "batch seq heads *key_dim"]
    ) -> Float[Array, "batch seq heads *key_dim"]:
        step = step + _of_heads(self.dt_bias, step.dtype)
        rate = jnp.exp(_of_heads(self.a_log, step.dtype))
        rate = rate[..., None] if self.by_dim else rate
        if self.bound is None:
            return -rate * jax.nn.softplus(step)
        return scale_by(jax.nn.sigmoid(rate * step), self.bound)

    def _finish(self, made: _Inputs, out: Heads) -> Stream:
        wide = jnp.promote_types(out.dtype, jnp.float32)
        activation = ACTIVATIONS[self.gate_activation]
        gated = self.norm(out).astype(wide) * activation(made.gate.astype(wide))
        return self.o_proj(gated.astype(out.dtype))


def _of_heads(param: nnx.Param, dtype: DTypeLike) -> Array:
    """Returns a value for each head, beside those of tokens."""
    return jnp.expand_dims(param[...].astype(dtype), (0, 1))


def _unit(x: Heads) -> Heads:
    """Scales heads to length 1."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + _LENGTH_EPS)
