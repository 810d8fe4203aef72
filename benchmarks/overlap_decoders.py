"""The decoders of `overlap.py`: whole models, on meshes with more than data axes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import fsdp_jax as fsdp
from bridge.models import DecoderConfig, MoEConfig, RopeConfig
from fsdp_jax.cli._model import fused_next_token_loss, plan_decoder
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS

SEQ = 4096


@dataclasses.dataclass(frozen=True)
class DecoderCase:
    """A model, on how many H200s it trains, and how they share it.

    Attributes:
      config: Its sizes.
      gpus: H200s, in nodes of 8.
      mesh: Sizes of the mesh's axes; `dp_shard` takes what these leave.
      rows: Sequences of 4,096 tokens for each rank of the data axes.
    """

    config: DecoderConfig
    gpus: int
    mesh: dict[str, int]
    rows: int

    def lower(self, tx):
        """The plan, and its step lowered for GPUs that are not here."""
        devices = gpu_devices(GPUS["h200"], self.gpus)
        mesh = fsdp.make_mesh(**self.mesh, devices=devices)
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.bfloat16
        )
        config = fsdp.FSDPConfig(
            mp_policy=policy, remat_policy=jax.checkpoint_policies.nothing_saveable
        )
        plan = plan_decoder(self.config, mesh, config, prefetch=1, unroll=2)
        rows = self.rows * self.gpus // mesh.shape["tp"]
        tokens = jax.ShapeDtypeStruct(
            (rows, SEQ + 1), jnp.int32, sharding=plan.batch_sharding
        )
        step = fsdp.make_train_step(plan, fused_next_token_loss, tx)
        return plan, step.lower(fsdp.abstract_state(plan, tx), tokens)


LLAMA_3_70B = DecoderConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    norm_eps=1e-5,
    rope=RopeConfig(rope_theta=500000.0),
)

MIXTRAL_8X7B = DecoderConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    norm_eps=1e-5,
    rope=RopeConfig(rope_theta=1e6),
    moe=MoEConfig(
        num_experts=8,
        num_experts_per_tok=2,
        intermediate_size=14336,
        norm_topk_prob=True,
    ),
)

DECODERS = {
    "llama-3-70b": DecoderCase(LLAMA_3_70B, 64, {"tp": 8}, rows=4),
    "mixtral-8x7b": DecoderCase(MIXTRAL_8X7B, 64, {"ep": 8}, rows=1),
}
"""What `--decoder` takes."""
