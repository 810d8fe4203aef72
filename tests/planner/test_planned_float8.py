"""A planned step multiplies in float8 on the GPU, and is priced so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bridge.models import float8_product
from fsdp_jax.hlo._parse import parse
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._kernel import Kernel, kernel_seconds
from fsdp_jax.planner._schedule import kernels_of, schedule_of

pytestmark = pytest.mark.plan
SIZE = 256


def test_three_products_of_a_layer_are_of_float8_and_take_half_the_time():
    (device,) = gpu_devices(GPUS["h100"], 1)
    sharding = NamedSharding(Mesh([device], ("dp",)), PartitionSpec())
    x = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16, sharding=sharding)

    def gradients(x, kernel, grad):
        out, pull = jax.vjp(lambda x, kernel: float8_product(x, kernel, 1), x, kernel)
        return out, *pull(grad)

    jax.config.update("jax_disable_most_optimizations", False)
    compiled = jax.jit(gradients).lower(x, x, x).compile()
    jax.config.update("jax_disable_most_optimizations", True)
    text = compiled.as_text()
    assert text
    kernels = [one for one in kernels_of(schedule_of(parse(text))) if one.flops]
    assert [one.dtype[:2] for one in kernels] == ["f8"] * 3
    cost = GPUS["h100"].cost
    large = [Kernel("matmul", 1e12, dtype, 0.0) for dtype in ("f8e4m3fn", "bf16")]
    narrow, wide = (kernel_seconds(one, cost) - cost.kernel_latency for one in large)
    assert wide / narrow == pytest.approx(cost.float8_speed)
