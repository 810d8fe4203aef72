"""The decoder that the commands train, as a plan, and its loss."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, DecoderLayer


def plan_decoder(
    config: DecoderConfig, mesh: Mesh, param_dtype: str = "float32"
) -> fsdp.Plan:
    """Plans the decoder of a config, a layer a unit.

    Args:
      config: The model.
      mesh: From `fsdp_jax.make_mesh`.
      param_dtype: What weights are gathered and computed in; they rest and are
        updated in float32.
    """
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.dtype(param_dtype))
    return fsdp.fully_shard(
        functools.partial(_make_decoder, config),
        mesh,
        units=[DecoderLayer],
        config=fsdp.FSDPConfig(mp_policy=policy),
    )


def next_token_loss(
    model: Decoder, tokens: Int[Array, "batch seq+1"]
) -> Float[Array, ""]:
    """Cross entropy of each token given those before it, in float32, the mean."""
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def _make_decoder(config: DecoderConfig, key: Array) -> Decoder:
    return Decoder(config, rngs=nnx.Rngs(key), scan=fsdp.scan)
