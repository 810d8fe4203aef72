"""The decoder that the commands train, as a plan, and its loss."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

import fsdp_jax as fsdp
from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    dot_product_attention,
    tensor_parallel_rules,
)


def plan_decoder(
    config: DecoderConfig,
    mesh: Mesh,
    fsdp_config: fsdp.FSDPConfig | None = None,
    *,
    prefetch: int = 1,
    unroll: int = 1,
) -> fsdp.Plan:
    """Plans the decoder of a config, a layer a unit, its matrices split over `tp`.

    Args:
      config: The model.
      mesh: From `fsdp_jax.make_mesh`.
      fsdp_config: How it is sharded; default ZeRO-3 in float32.
      prefetch: As for `fsdp_jax.scan`.
      unroll: As for `fsdp_jax.scan`.
    """
    rules = tensor_parallel_rules(config, mesh.shape["tp"])
    return fsdp.fully_shard(
        functools.partial(_make_decoder, config, prefetch, unroll),
        mesh,
        units=[DecoderLayer],
        config=dataclasses.replace(
            fsdp_config or fsdp.FSDPConfig(), tensor_parallel=rules
        ),
    )


def computed_in(param_dtype: str) -> fsdp.FSDPConfig:
    """Weights are gathered and computed in this dtype, and kept in float32."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.dtype(param_dtype))
    return fsdp.FSDPConfig(mp_policy=policy)


def check_rows(seq: int, tp: int) -> None:
    """Raises a `ValueError` if rows of `seq` tokens do not divide over `tp`."""
    if tp > 1 and seq % tp:
        raise ValueError(
            f"--seq {seq}: tp={tp} splits the tokens of a row, and does not divide "
            f"them. Use a multiple of {tp}."
        )


def loss_of(*, fused: bool) -> Callable[..., Float[Array, ""]]:
    """The loss that the commands train with: logits at once, or a chunk at a time."""
    return fused_next_token_loss if fused else next_token_loss


def next_token_loss(
    model: Decoder, tokens: Int[Array, "batch seq+1"]
) -> Float[Array, ""]:
    """Cross entropy of each token given those before it, in float32, the mean."""
    states, _ = model.final_states(tokens[:, :-1])
    logits = states @ fsdp.ops.pad_vocabulary(model.head_kernel())
    losses = fsdp.ops.vocab_parallel_cross_entropy(
        model.finish_logits(logits), tokens[:, 1:], vocab_size=model.config.vocab_size
    )
    return losses.mean()


def fused_next_token_loss(
    model: Decoder, tokens: Int[Array, "batch seq+1"]
) -> Float[Array, ""]:
    """The same, in the memory of a chunk of the vocabulary; a product more."""
    states, _ = model.final_states(tokens[:, :-1])
    losses = fsdp.ops.fused_linear_cross_entropy(
        states,
        fsdp.ops.pad_vocabulary(model.head_kernel()),
        tokens[:, 1:],
        vocab_size=model.config.vocab_size,
        logit_fn=model.finish_logits,
    )
    return losses.mean()


def _make_decoder(
    config: DecoderConfig, prefetch: int, unroll: int, key: Array
) -> Decoder:
    scan = functools.partial(fsdp.scan, prefetch=prefetch, unroll=unroll)
    return Decoder(
        config,
        rngs=nnx.Rngs(key),
        scan=scan,
        attention=fsdp.ops.split_heads(dot_product_attention),
        constrain=fsdp.ops.sequence_parallel,
    )
