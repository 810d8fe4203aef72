"""A planned step multiplies in float8 on the GPU, and is priced so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bridge.models import float8_product, mxfp8_product
from fsdp_jax.hlo._parse import parse
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._kernel import Kernel, kernel_seconds
from fsdp_jax.planner._schedule import kernels_of, schedule_of

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


@pytest.mark.parametrize("gpu, dtype", [("b200", "f8"), ("h100", "bf")])
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
