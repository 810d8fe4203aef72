"""A planned step has the attention kernel of the GPUs that it is planned for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bridge.models import dot_product_attention
from bridge.models._attention_choice import Accelerator
from fsdp_jax.hlo._parse import parse
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._kernel import attention_names
from fsdp_jax.planner._schedule import kernels_of, schedule_of

pytestmark = pytest.mark.plan
ROWS, SEQ, HEADS, KV_HEADS = 8, 256, 4, 2


def lowered(attention, devices, *, dtype=jnp.bfloat16, width=64):
    """The gradient of attention on a mesh of these devices, a row each."""
    mesh = Mesh(devices, ("dp",))
    split = PartitionSpec("dp")

    def gradient(q, k, v):
        def total(*args):
            return attention(*args).astype(jnp.float32).sum()

        return jax.grad(total, argnums=(0, 1, 2))(q, k, v)

    mapped = jax.shard_map(
        gradient, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
    )
    sharding = NamedSharding(mesh, split)
    arguments = [
        jax.ShapeDtypeStruct((ROWS, SEQ, heads, width), dtype, sharding=sharding)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    return jax.jit(mapped).lower(*arguments)


def custom_calls(text):
    """Each call of a kernel, with its operands, attributes and types."""
    lines = (line for line in text.splitlines() if "custom_call @__" in line)
    return [line.partition(" = ")[2] for line in lines]


def planned(q, k, v):
    return dot_product_attention(q, k, v, scale=0.125)


@pytest.mark.parametrize("name", GPUS)
def test_an_absent_gpu_has_the_compute_capability_of_its_name(name):
    (device,) = gpu_devices(GPUS[name], 1)
    assert Accelerator.of(device).capability == GPUS[name].compute_capability


def test_the_kernel_of_the_absent_gpu_is_in_its_program():
    devices = gpu_devices(GPUS["h100"], 8)
    compiled = lowered(planned, devices).compile()
    schedule = schedule_of(parse(compiled.as_text()))
    names = attention_names(kernels_of(schedule))
    assert names == ("cuDNN's forward", "cuDNN's backward")
    # No scores [heads, seq, seq] are in memory.
    stats = compiled.memory_analysis()
    assert stats.temp_size_in_bytes < HEADS * SEQ * SEQ * 4


@pytest.mark.parametrize("window", [None, 128])
def test_it_is_what_jax_calls_where_cudnn_is_installed(window, monkeypatch):
    def by_jax(q, k, v):
        local = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            *(q, k, v),
            scale=0.125,
            is_causal=True,
            local_window_size=local,
            implementation="cudnn",
        )

    def ours(q, k, v):
        return dot_product_attention(q, k, v, scale=0.125, window=window)

    devices = gpu_devices(GPUS["h100"], 8)
    found = lowered(ours, devices).as_text()
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    assert len(custom_calls(found)) == 2
    assert custom_calls(found) == custom_calls(lowered(by_jax, devices).as_text())


def test_the_flash_kernel_computes_softcaps_of_packed_rows_for_an_absent_gpu():
    def packed(q, k, v):
        segments = jnp.zeros(q.shape[:2], jnp.int32)
        how = {"scale": 0.125, "softcap": 50.0, "window": 100, "segment_ids": segments}
        return dot_product_attention(q, k, v, **how)

    compiled = lowered(packed, gpu_devices(GPUS["h100"], 8)).compile()
    kernels = kernels_of(schedule_of(parse(compiled.as_text())))
    assert attention_names(kernels) == ("flash forward", "flash backward")
    # Neither scores nor masks [heads, seq, seq] are in memory.
    assert compiled.memory_analysis().temp_size_in_bytes < HEADS * SEQ * SEQ


@pytest.mark.parametrize("case", [{"dtype": jnp.float32}, {"width": 264}])
def test_what_the_kernel_does_not_take_is_computed_by_xla(case):
    text = lowered(planned, gpu_devices(GPUS["h100"], 8), **case).as_text()
    assert "fmha" not in text


def test_on_cpus_there_is_no_kernel_of_a_gpu():
    assert "fmha" not in lowered(planned, jax.devices()[:8]).as_text()
