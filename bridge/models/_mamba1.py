"""Mamba 1 mixer: a state space model whose channels decay each by itself."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._causal_conv import CausalConv, Mask
from bridge.models._config import DecoderConfig
from bridge.models._head_linear import HeadLinear
from bridge.models._linear import Linear
from bridge.models._mamba1_config import Mamba1Config
from bridge.models._norm import Norm
from bridge.models._recurrent_mixer import RecurrentMixer, Stream
from bridge.models._selective_scan import selective_scan

Channels = Float[Array, "batch seq channels"]


class _Inputs(NamedTuple):
    """Projections of the tokens: a gate, and what is convolved."""

    gate: Channels
    x: Channels


class Mamba1(RecurrentMixer):
    """Mixer whose time steps and projections of the state follow from the token.

    Args:
      config: Config of the decoder, with `mamba1` set.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_mamba.py::MambaMixer`,
      `modeling_jamba.py::JambaMambaMixer`, `modeling_zamba.py::ZambaMambaMixer`.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes projections, the convolution, decays and norms."""
        sizes, embed = config.mamba1, (config.hidden_size,)
        assert sizes is not None
        options: dict[str, Any] = {
            "std": config.initializer_range,
            "rngs": rngs,
            "param_dtype": param_dtype,
        }
        linear, biased = partial(Linear, **options), {"bias": sizes.proj_bias}
        channels, state = (sizes.num_channels,), (sizes.state_size,)
        rank = (sizes.time_step_rank,)
        fused, apart = sizes.fused_gate, not sizes.fused_gate
        self.xz_proj = linear(embed, (*channels, 2), **biased) if fused else None
        self.z_proj = linear(embed, channels, **biased) if apart else None
        self.x_proj = linear(embed, channels, **biased) if apart else None
        self.x_conv = CausalConv(
            channels, sizes.kernel_size, bias=sizes.conv_bias, **options
        )
        self._make_step(sizes, options)

        def norm(shape: tuple[int, ...]) -> Norm | None:
            if not sizes.norm:
                return None
            epsilon = config.norm_eps if sizes.norm_eps is None else sizes.norm_eps
            scale = {"scale": sizes.norm_scale, "param_dtype": param_dtype}
            return Norm(shape, "rms", epsilon, **scale)

        self.step_norm, self.b_norm, self.c_norm = norm(rank), norm(state), norm(state)
        decays = jnp.log(jnp.arange(1, sizes.state_size + 1, dtype=jnp.float32))
        self.a_log = nnx.Param(
            jnp.tile(decays[None], (sizes.num_channels, 1)).astype(param_dtype)
        )
        self.skip = nnx.Param(jnp.ones(channels, param_dtype))
        self.o_proj = linear(channels, embed, **biased)

    def _make_step(self, sizes: Mamba1Config, options: dict[str, Any]) -> None:
        """Makes projections of channels to time steps and of the state, and back."""
        channels, state = sizes.num_channels, sizes.state_size
        rank, heads = sizes.time_step_rank, sizes.num_heads
        if heads is None:
            linear = partial(Linear, **options)
            self.step_proj = linear((channels,), (rank,))
            self.b_proj = linear((channels,), (state,))
            self.c_proj = linear((channels,), (state,))
            self.dt_proj = linear((rank,), (channels,), bias=True)
        else:
            by_head, width = partial(HeadLinear, heads, **options), channels // heads
            self.step_proj = by_head(width, rank)
            self.b_proj, self.c_proj = by_head(width, state), by_head(width, state)
            self.dt_proj = by_head(rank, width, bias=True)
        self.num_heads = heads

    def _project(self, x: Stream) -> _Inputs:
        if self.xz_proj is not None:
            both = self.xz_proj(x)
            return _Inputs(both[..., 1], both[..., 0])
        assert self.z_proj is not None and self.x_proj is not None
        return _Inputs(self.z_proj(x), self.x_proj(x))

    def _convs(self) -> dict[str, CausalConv]:
        return {"x": self.x_conv}

    def _recur(
        self,
        made: _Inputs,
        memory: Array | None,
        segment_ids: Array | None,
        is_token: Mask,
    ) -> tuple[Channels, Array]:
        """Runs the state space model over convolved inputs, in float32."""
        x = jax.nn.silu(made.x)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        own = x
        if self.num_heads is not None:
            own = x.reshape(*x.shape[:2], self.num_heads, -1)
        rank = _normed(self.step_norm, self.step_proj(own))
        b = _normed(self.b_norm, self.b_proj(own))
        c = _normed(self.c_norm, self.c_proj(own))
        step = self.dt_proj(rank).reshape(x.shape)
        step = jax.nn.softplus(step.astype(wide))
        if is_token is not None:  # Padding changes nothing.
            step = jnp.where(is_token[..., None], step, 0)
        rate = -jnp.exp(self.a_log[...].astype(wide))
        out, memory = selective_scan(x, b, c, step, rate, memory, segment_ids)
        skip = jnp.expand_dims(self.skip[...].astype(wide), (0, 1))
        return out + skip * x.astype(wide), memory

    def _finish(self, made: _Inputs, out: Channels) -> Stream:
        gate = jax.nn.silu(made.gate.astype(out.dtype))
        return self.o_proj((out * gate).astype(made.gate.dtype))


def _normed(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)
