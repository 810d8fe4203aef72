"""A planned step multiplies in float8 on the GPU, and is priced so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fsdp_jax as fsdp
from bridge.models import DecoderConfig, float8_product, mxfp8_product
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import next_token_loss
from fsdp_jax.hlo._parse import parse
from fsdp_jax.planner import estimate_step
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._kernel import Kernel, kernel_seconds
from fsdp_jax.planner._schedule import Loop, Run, kernels_of, schedule_of

pytestmark = pytest.mark.plan
SIZE = 256


def products_of(product, gpu):
    """The kernels with products of a layer and its backward, compiled for a GPU."""
    (device,) = gpu_devices(GPUS[gpu], 1)
    sharding = NamedSharding(Mesh([device], ("dp",)), PartitionSpec())
    x = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16, sharding=sharding)

    def gradients(x, kernel, grad):
        out, pull = jax.vjp(lambda x, kernel: product(x, kernel, 1), x, kernel)
        return out, *pull(grad)

    jax.config.update("jax_disable_most_optimizations", False)
    compiled = jax.jit(gradients).lower(x, x, x).compile()
    jax.config.update("jax_disable_most_optimizations", True)
    text = compiled.as_text()
    assert text
    return [one for one in kernels_of(schedule_of(parse(text))) if one.flops]


# XLA of jax 0.12 takes cuDNN's product of blocks only with a GPU to try it on.
WITHOUT_GPU = "f8" if jax.__version_info__ < (0, 12) else "bf"


@pytest.mark.parametrize("gpu, dtype", [("b200", WITHOUT_GPU), ("h100", "bf")])
def test_products_in_blocks_are_of_float8_where_the_gpu_has_them(gpu, dtype):
    kernels = products_of(mxfp8_product, gpu)
    assert [one.dtype[:2] for one in kernels] == [dtype] * 3
    assert [one.flops for one in kernels] == [2.0 * SIZE**3] * 3


def test_three_products_of_a_layer_are_of_float8_and_take_half_the_time():
    kernels = products_of(float8_product, "h100")
    assert [one.dtype[:2] for one in kernels] == ["f8"] * 3
    cost = GPUS["h100"].cost
    large = [Kernel("matmul", 1e12, dtype, 0.0) for dtype in ("f8e4m3fn", "bf16")]
    narrow, wide = (kernel_seconds(one, cost) - cost.kernel_latency for one in large)
    assert wide / narrow == pytest.approx(cost.float8_speed)


CONFIG = DecoderConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def float8_flops(steps, times=1):
    """FLOPs in float8 of a schedule, with those of all iterations of its loops."""
    found = 0.0
    for one in steps:
        if isinstance(one, Loop):
            found += float8_flops(one.body, times * one.times)
        elif isinstance(one, Run) and one.kernel.dtype[:2] == "f8":
            found += times * one.kernel.flops
    return found


def test_layers_that_keep_bfloat16_are_priced_so():
    found = []
    jax.config.update("jax_disable_most_optimizations", False)
    for kept in (0, 2):
        policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
        mesh = fsdp.make_mesh(devices=gpu_devices(GPUS["h100"], 2))
        plan = plan_decoder(
            CONFIG,
            mesh,
            fsdp.FSDPConfig(mp_policy=policy),
            products="float8",
            num_layers_at_start_in_bf16=kept,
            num_layers_at_end_in_bf16=kept,
        )
        tokens = jax.ShapeDtypeStruct((4, 257), jnp.int32)
        options = {"gpu": GPUS["h100"], "guide": False}
        estimate = estimate_step(
            plan, next_token_loss, optax.sgd(0.1), tokens, **options
        )
        text = estimate.compiled.as_text() or ""
        found.append(float8_flops(schedule_of(parse(text))))
    jax.config.update("jax_disable_most_optimizations", True)
    assert found[1] == pytest.approx(found[0] / 2) and found[0] > 0
