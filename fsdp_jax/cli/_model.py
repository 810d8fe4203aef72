"""The decoder that the commands train, as a plan, and its loss."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, DecoderLayer


def plan_decoder(
    config: DecoderConfig,
    mesh: Mesh,
    fsdp_config: fsdp.FSDPConfig | None = None,
    *,
    prefetch: int = 1,
    unroll: int = 1,
) -> fsdp.Plan:
    """Plans the decoder of a config, a layer a unit.

    Args:
      config: The model.
      mesh: From `fsdp_jax.make_mesh`.
      fsdp_config: How it is sharded; default ZeRO-3 in float32.
      prefetch: As for `fsdp_jax.scan`.
      unroll: As for `fsdp_jax.scan`.
    """
    return fsdp.fully_shard(
        functools.partial(_make_decoder, config, prefetch, unroll),
        mesh,
        units=[DecoderLayer],
        config=fsdp_config,
    )


def computed_in(param_dtype: str) -> fsdp.FSDPConfig:
    """Weights are gathered and computed in this dtype, and kept in float32."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.dtype(param_dtype))
    return fsdp.FSDPConfig(mp_policy=policy)


def next_token_loss(
    model: Decoder, tokens: Int[Array, "batch seq+1"]
) -> Float[Array, ""]:
    """Cross entropy of each token given those before it, in float32, the mean."""
    logits = model(tokens[:, :-1])
    return fsdp.ops.vocab_parallel_cross_entropy(logits, tokens[:, 1:]).mean()


def _make_decoder(
    config: DecoderConfig, prefetch: int, unroll: int, key: Array
) -> Decoder:
    scan = functools.partial(fsdp.scan, prefetch=prefetch, unroll=unroll)
    return Decoder(config, rngs=nnx.Rngs(key), scan=scan)
