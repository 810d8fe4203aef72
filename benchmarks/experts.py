"""What experts take on a GPU by `grouped_matmul`, and by `jax.lax.ragged_dot`.

    python benchmarks/experts.py [--layers 16] [--out FILE]

A decoder of OLMoE's sizes, 64 experts of which a token chooses 8, is planned for 8
H200s, 8 experts on each, and compiled for them without one: dropless, and with room for
as many tokens as would choose an expert if all were chosen as often. JSON goes to
stdout: memory as compiled, and the modelled step.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import optax
import result

import bridge.models._moe as moe
import fsdp_jax as fsdp
from bridge.models import DecoderConfig, MoEConfig, RopeConfig
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import next_token_loss
from fsdp_jax.cli._routing import Routing
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS

GPU, RANKS, SEQ = "h200", 8, 4096
CAPACITY = {"dropless": None, "capacity 1.0": 1.0}


def olmoe(layers: int) -> DecoderConfig:
    """OLMoE-1B-7B, of so many layers."""
    return DecoderConfig(
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=SEQ,
        norm_eps=1e-5,
        qk_norm="full",
        rope=RopeConfig(rope_theta=1e4),
        moe=MoEConfig(num_experts=64, num_experts_per_tok=8, intermediate_size=1024),
    )


def by_ragged_dot(multiply, x, kernel, group_sizes, expected_rows):
    """What `grouped_matmul` stands for, in the place of a layer's grouped product."""
    del multiply, expected_rows
    matrices = kernel.reshape(*kernel.shape[:2], -1)  # gate beside up
    out = jax.lax.ragged_dot(x, matrices, jnp.asarray(group_sizes))
    return out.reshape(len(x), *kernel.shape[2:])


PRODUCTS = {"ragged_dot": by_ragged_dot, "grouped_matmul": moe._product}


def compiled(layers: int, capacity_factor: float | None):
    """The estimate of a step, a sequence a rank."""
    mesh = fsdp.make_mesh(ep=RANKS, devices=gpu_devices(GPUS[GPU], RANKS))
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.bfloat16
    )
    config = fsdp.FSDPConfig(
        mp_policy=policy, remat_policy=jax.checkpoint_policies.nothing_saveable
    )
    routing = Routing(capacity_factor=capacity_factor, router_dtype="model")
    plan = plan_decoder(olmoe(layers), mesh, config, routing, prefetch=1)
    batch = jax.ShapeDtypeStruct((RANKS, SEQ + 1), jnp.int32)
    tx = optax.adamw(1e-3)
    return fsdp.estimate_step(plan, next_token_loss, tx, batch, gpu=GPU, gpus=RANKS)


def main():
    """Compiles each, and prints what they take."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    result.add_arguments(parser)
    args = parser.parse_args()
    packages = ("jax", "jaxlib", "jax-cuda12-plugin", "optax")
    conditions = result.begin(args, packages)
    jax.config.update("jax_platforms", "cpu")  # nothing is asked of a GPU
    rows = []
    for dispatch, factor in CAPACITY.items():
        for product, function in PRODUCTS.items():
            moe._product = function
            found = compiled(args.layers, factor)
            rows.append(
                {
                    "dispatch": dispatch,
                    "product": product,
                    "memory_gb": round(found.compiled_bytes / 1e9, 3),
                    "memory_predicted_gb": round(found.memory.total / 1e9, 3),
                    "step_ms": round(1e3 * found.timeline.seconds, 1),
                    "floor_ms": round(1e3 * found.floor_seconds, 1),
                }
            )
    found = {
        "gpus": f"{RANKS} x {GPU}, as modelled",
        "tokens_a_rank": SEQ,
        "rows": rows,
    }
    result.write(args, conditions, found)


if __name__ == "__main__":
    main()
