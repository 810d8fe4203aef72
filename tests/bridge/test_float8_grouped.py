"""Grouped products in float8: what is rounded, to what, and what the GPU multiplies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.compare import worst
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bridge.models import (
    Decoder,
    DecoderConfig,
    MoEConfig,
    float8_grouped_matmul,
    grouped_matmul,
)
from bridge.models._float8_grouped import _matrices, _round, _rows
from bridge.models._grouped import matrices_in_blocks, rows_in_blocks

GROUPS, EMBED, WIDTH, ROWS = 3, 32, 16, 300
SIZES = jnp.asarray([120, 0, 150])  # And 30 rows behind the last group.


def arrays():
    random = np.random.default_rng(0)
    shapes = [(ROWS, EMBED), (GROUPS, EMBED, WIDTH), (ROWS, WIDTH)]
    x, kernel, grad = (jnp.asarray(random.normal(size=s), jnp.float32) for s in shapes)
    return x, kernel * jnp.asarray([1.0, 1.0, 1e-3])[:, None, None], grad


def results(product, x, kernel, grad):
    def of(x, kernel):
        return product(x, kernel, SIZES)

    out, pull = jax.vjp(of, x, kernel)
    return out, *pull(grad)


def rounded(x, dtype, dims):
    x, limit = np.asarray(x), float(jnp.finfo(dtype).max)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max(dims, keepdims=True) / limit))
    return jnp.asarray((x / scale).astype(dtype).astype(np.float32) * scale)


def test_operands_are_rounded_once_and_each_group_has_its_own_scale():
    x, kernel, grad = arrays()
    found = results(float8_grouped_matmul, x, kernel, grad)
    kernel8 = rounded(kernel, jnp.float8_e4m3fn, (1, 2))
    exact = [
        rounded(x, jnp.float8_e4m3fn, (0, 1)),
        jnp.asarray(kernel8, jnp.float32),
        rounded(grad, jnp.float8_e5m2, (0, 1)),
    ]
    exact = [one.astype(jnp.float32) for one in exact]
    assert worst(found, results(grouped_matmul, *exact)) < 1e-5  # Float32 sums.
    # A control: e4m3 and e5m2 round to 2^-4 and 2^-3, a factor, and it is seen.
    assert 1e-3 < worst(found, results(grouped_matmul, x, kernel, grad)) < 0.2


def test_blocks_of_gpus_compute_the_same():
    x, kernel, grad = arrays()
    rows, matrices = (
        _round(x[None], jnp.float8_e4m3fn),
        _round(kernel, jnp.float8_e4m3fn),
    )
    want = _rows(ROWS, (rows, jnp.float8_e4m3fn), matrices, SIZES, jnp.float32)
    numbers = [
        jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
        for bits in (rows.bits[0], matrices.bits)
    ]
    blocks = rows_in_blocks(numbers[0], numbers[1], SIZES, dtype=jnp.float32)
    owners = jnp.repeat(matrices.scale, SIZES, total_repeat_length=ROWS)
    assert worst(blocks * (rows.scale[0] * owners)[:, None], want) < 1e-6
    grads = _round(grad[None], jnp.float8_e5m2)
    of_kernel = _matrices(ROWS, rows, grads, SIZES, jnp.float32)
    grad8 = jax.lax.bitcast_convert_type(grads.bits[0], jnp.float8_e5m2)
    blocks = matrices_in_blocks(numbers[0], grad8, SIZES, jnp.float32)
    assert worst(blocks * rows.scale[0] * grads.scale[0], of_kernel) < 1e-6


@pytest.mark.plan
def test_each_block_is_a_product_of_float8_on_the_gpu():
    from fsdp_jax.hlo._parse import parse
    from fsdp_jax.planner._compile import gpu_devices
    from fsdp_jax.planner._gpu import GPUS
    from fsdp_jax.planner._schedule import kernels_of, schedule_of

    (device,) = gpu_devices(GPUS["h100"], 1)
    sharding = NamedSharding(Mesh([device], ("dp",)), PartitionSpec())

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    given = shape(1024, 256), shape(4, 256, 512), shape(4, dtype=jnp.int32)

    def step(x, kernel, sizes):
        def of(x, kernel):
            return float8_grouped_matmul(x, kernel, sizes)

        out, pull = jax.vjp(of, x, kernel)
        return out, *pull(out)

    jax.config.update("jax_disable_most_optimizations", False)
    # As of a training step.
    options: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
    text = jax.jit(step).lower(*given).compile(options).as_text()
    jax.config.update("jax_disable_most_optimizations", True)
    kernels = kernels_of(schedule_of(parse(text or "")))
    assert [one.dtype[:2] for one in kernels if one.flops] == ["f8"] * 3


def test_the_experts_of_a_decoder_take_it_but_in_layers_that_are_kept():
    moe = MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=16)
    config = DecoderConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        moe=moe,
    )
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 16)), jnp.int32)
    given = [{}, {"expert_product": float8_grouped_matmul}]
    given += [given[1] | {"num_layers_at_end_in_bf16": kept} for kept in (1, 2)]
    logits = [Decoder(config, rngs=nnx.Rngs(0), **one)(tokens) for one in given]
    none, every, some, kept = (np.asarray(one) for one in logits)
    np.testing.assert_array_equal(kept, none)
    assert 1e-4 < worst(some, none) < worst(every, none) < 0.1
