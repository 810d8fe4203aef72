"""`--remat` keeps what it says on the GPU, or on its host, in the GPU's program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import fsdp_jax as fsdp
from bridge.models import DecoderConfig
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import loss_of
from fsdp_jax.cli._remat import Remat
from fsdp_jax.cli._sharding_options import Strategy
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._schedule import kernels_of

pytestmark = pytest.mark.plan
LAYERS, ROWS, SEQ, WIDTH = 6, 8, 512, 64
CONFIG = DecoderConfig(
    vocab_size=256,
    hidden_size=WIDTH,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def estimate(remat: Remat):
    mesh = fsdp.make_mesh(devices=gpu_devices(GPUS["h100"], 1))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    config = Strategy(remat=remat).applied(fsdp.FSDPConfig(mp_policy=policy), mesh)
    plan = plan_decoder(CONFIG, mesh, config)
    batch = jax.ShapeDtypeStruct((ROWS, SEQ + 1), jnp.int32)
    options = {"gpu": "h100", "gpus": 1, "guide": False}
    return fsdp.estimate_step(
        plan, loss_of(fused=True), optax.sgd(0.1), batch, **options
    )


def test_the_inputs_of_all_layers_are_on_the_host_and_not_on_the_gpu():
    found = {remat: estimate(remat) for remat in ("nothing", "offload")}
    stats = {name: one.compiled.memory_analysis() for name, one in found.items()}
    inputs = LAYERS * ROWS * SEQ * WIDTH * 2
    assert stats["nothing"].host_temp_size_in_bytes == 0
    assert stats["offload"].host_temp_size_in_bytes == inputs
    saved = [one.compiled_bytes for one in found.values()]
    # One layer's input is on the GPU at a time, or two.
    assert saved[0] - saved[1] >= inputs * (LAYERS - 2) / LAYERS
    # The prediction knows it too.
    assert found["nothing"].memory.total - found["offload"].memory.total >= inputs / 2


def test_dots_are_saved_with_the_outputs_of_fused_attention():
    kinds = {
        remat: [kernel.kind for kernel in kernels_of(estimate(remat).schedule)]
        for remat in ("nothing", "dots")
    }
    # Once in the loop of forward, and once more in that of backward.
    assert kinds["nothing"].count("attention") == 2
    assert kinds["dots"].count("attention") == 1
    assert kinds["dots"].count("matmul") < kinds["nothing"].count("matmul")
