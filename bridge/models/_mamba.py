"""Mamba 2 mixer: a state space model with one decay a head."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._causal_conv import CausalConv, Mask
from bridge.models._config import DecoderConfig
from bridge.models._linear import Linear
from bridge.models._multipliers_config import MultipliersConfig
from bridge.models._norm import Norm
from bridge.models._recurrent_mixer import Heads, RecurrentMixer, Stream
from bridge.models._scale import scale_by
from bridge.models._state_space import state_space


class _Inputs(NamedTuple):
    """Projections of the tokens: a gate, three to convolve, and a time step a head."""

    gate: Heads
    x: Heads
    b: Heads
    c: Heads
    step: Float[Array, "batch seq heads"]


class Mamba(RecurrentMixer):
    """Mixer whose state of each channel decays, adds the token and is read by it.

    Args:
      config: Config of the decoder, with `mamba` set.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers
      `modeling_granitemoehybrid.py::GraniteMoeHybridMambaLayer`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes projections, convolutions, decays and the norm."""
        sizes, embed = config.mamba, (config.hidden_size,)
        assert sizes is not None
        options: dict[str, Any] = {
            "std": config.initializer_range,
            "rngs": rngs,
            "param_dtype": param_dtype,
        }
        linear = partial(Linear, bias=sizes.proj_bias, **options)
        heads, head_dim, groups = sizes.num_heads, sizes.head_dim, sizes.num_groups
        channels, state = (heads, head_dim), (groups, sizes.state_size)
        self.z_proj, self.x_proj = linear(embed, channels), linear(embed, channels)
        self.b_proj, self.c_proj = linear(embed, state), linear(embed, state)
        self.dt_proj = linear(embed, (heads,))
        conv = partial(
            CausalConv,
            kernel_size=sizes.kernel_size,
            bias=sizes.conv_bias,
            **options,
        )
        self.x_conv, self.b_conv, self.c_conv = conv(channels), conv(state), conv(state)
        decays = jnp.log(jnp.arange(1, heads + 1, dtype=jnp.float32))
        self.a_log = nnx.Param(decays.astype(param_dtype))
        self.dt_bias = nnx.Param(jnp.ones(heads, param_dtype))
        self.skip = nnx.Param(jnp.ones(heads, param_dtype))
        inside = (groups, heads // groups * head_dim)
        epsilon = config.norm_eps if sizes.norm_eps is None else sizes.norm_eps
        norm = Norm(inside, "rms", epsilon, param_dtype=param_dtype)
        self.norm = None if sizes.norm is None else norm
        self.o_proj = linear(channels, embed)
        self.sizes = sizes
        self.multipliers = config.multipliers or MultipliersConfig()

    def _project(self, x: Stream) -> _Inputs:
        x = scale_by(x, self.multipliers.mamba_in)
        projections = self.z_proj, self.x_proj, self.b_proj, self.c_proj, self.dt_proj
        factors = self.multipliers.mamba_projections
        return _Inputs(
            *(scale_by(p(x), f) for p, f in zip(projections, factors, strict=True))
        )

    def _convs(self) -> dict[str, CausalConv]:
        return {"x": self.x_conv, "b": self.b_conv, "c": self.c_conv}

    def _recur(
        self,
        made: _Inputs,
        memory: Array | None,
        segment_ids: Array | None,
        is_token: Mask,
    ) -> tuple[Heads, Array]:
        """Runs the state space model over convolved inputs, in float32."""
        wide = jnp.promote_types(made.x.dtype, jnp.float32)
        x, b, c = (jax.nn.silu(part).astype(wide) for part in (made.x, made.b, made.c))
        times = x.shape[2] // b.shape[2]
        step = jax.nn.softplus((made.step + _of_heads(self.dt_bias)).astype(wide))
        step = jnp.clip(step, self.sizes.min_time_step, self.sizes.max_time_step)
        if is_token is not None:  # Padding changes nothing.
            step = jnp.where(is_token[..., None], step, 0)
        out, memory = state_space(
            x * step[..., None],
            jnp.repeat(b, times, axis=2),
            jnp.repeat(c, times, axis=2),
            -jnp.exp(_of_heads(self.a_log).astype(wide)) * step,
            memory,
            segment_ids,
            chunk_size=self.sizes.chunk_size,
        )
        return out + _of_heads(self.skip).astype(wide)[..., None] * x, memory

    def _finish(self, made: _Inputs, out: Heads) -> Stream:
        gate = jax.nn.silu(made.gate.astype(out.dtype))
        if self.sizes.norm == "before_gate":
            out = self._norm_groups(out) * gate
        else:
            out = self._norm_groups(out * gate)
        return self.o_proj(out.astype(made.gate.dtype))

    def _norm_groups(self, out: Heads) -> Heads:
        if self.norm is None:
            return out
        groups = out.reshape(*out.shape[:2], self.sizes.num_groups, -1)
        return self.norm(groups).reshape(out.shape)


def _of_heads(param: nnx.Param) -> Array:
    """Returns a value for each head, beside those of tokens."""
    return jnp.expand_dims(param[...], (0, 1))
