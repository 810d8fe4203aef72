"""Fused attention is plain attention: outputs and gradients, in float32 on CPUs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.compare import worst
from helpers.errors import facts
from helpers.plain_kernel import PlainKernel

from bridge.models import Accelerator, AttentionShape, choose_attention
from bridge.models._attention import attend, causal_mask
from bridge.models._flash_kernel import Blocks, FlashKernel
from bridge.models._fused_attention import fused_attention
from bridge.models._kernel_mask import Tokens, block_ranges

ROWS, SEQ, HEADS, KV_HEADS, WIDTH, V_WIDTH = 2, 40, 4, 2, 24, 16
SCALE = 0.3
FLASH = FlashKernel(Blocks((16, 32), (32, 16)), interpret=True)
SEGMENTS = np.repeat([[1, 2, 3], [1, 1, 2]], [5, 28, 7], axis=1).astype(np.int32)
CASES = {
    "sinks by cuDNN's passes": (PlainKernel(), {"sinks": np.linspace(-1, 2, HEADS)}),
    "causal": (FLASH, {}),
    "all at once": (
        FLASH,
        {
            "segment_ids": SEGMENTS,
            "window": jnp.int32(9),
            "softcap": 2.0,
            "sinks": np.linspace(-1, 2, HEADS),
        },
    ),
}
# Sums of at most 40 numbers of about 1, and their gradients, in float32.
TOLERANCE = 2e-5


def heads(*widths):
    random = np.random.default_rng(0)
    shapes = zip((HEADS, KV_HEADS, KV_HEADS, HEADS), widths, strict=True)
    return [
        jnp.asarray(random.normal(size=(ROWS, SEQ, *shape)), jnp.float32)
        for shape in shapes
    ]


def plain(q, k, v, *, segment_ids=None, window=None, softcap=None, sinks=None):
    mask = causal_mask(SEQ, segment_ids, window)
    return attend(q, k, v, SCALE, mask, softcap, sinks)


def results(attention, given, **how):
    """Output, and gradients of queries, keys, values and sinks."""
    q, k, v, cotangent = given
    sinks = how.pop("sinks", None)
    sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32)

    @jax.jit
    def run(q, k, v, sinks):
        def fn(q, k, v, sinks):
            return attention(q, k, v, sinks=sinks, **how)

        out, pull = jax.vjp(fn, q, k, v, sinks)
        return out, pull(cotangent)

    return run(q, k, v, sinks)


@pytest.mark.parametrize("case", CASES)
def test_it_is_attention_with_all_scores(case):
    kernel, how = CASES[case]
    given = heads(WIDTH, WIDTH, V_WIDTH, V_WIDTH)

    def fused(q, k, v, **how):
        return fused_attention(kernel, q, k, v, scale=SCALE, **how)

    found, wanted = results(fused, given, **how), results(plain, given, **how)
    assert worst(found, wanted) < TOLERANCE
    # A control: what the case is about changes the numbers.
    without = results(plain, given, **{k: v for k, v in how.items() if k == "window"})
    assert not how or worst(without[0], wanted[0]) > 100 * TOLERANCE


@pytest.mark.parametrize("window", [None, 12])
def test_the_blocks_that_are_not_visited_hold_nothing_that_is_seen(window):
    positions = jnp.broadcast_to(jnp.arange(48, dtype=jnp.int32), (ROWS, 48))
    segments = jnp.asarray(np.pad(SEGMENTS, ((0, 0), (0, 8)), constant_values=9))
    tokens = Tokens(positions, segments)
    limit = None if window is None else jnp.int32(window)
    by_query, by_key = jax.tree.map(
        np.asarray, block_ranges(tokens, tokens, limit, 8, 4)
    )
    seen = np.asarray(causal_mask(48, segments, window))[:, 0]
    blocks = seen.reshape(ROWS, 6, 8, 12, 4).any((2, 4))
    for ranges, meets in ((by_query, blocks), (by_key, blocks.swapaxes(1, 2))):
        other = np.arange(meets.shape[2])
        visited = (other >= ranges.first[..., None]) & (other < ranges.stop[..., None])
        assert not (meets & ~visited).any()
        # And of 72 pairs of blocks most are not visited.
        assert visited.sum() < ROWS * 72 / 2


H100 = Accelerator("NVIDIA H100 80GB HBM3", (9, 0))
B200 = Accelerator("NVIDIA B200", (10, 0))
A100 = Accelerator("NVIDIA A100-SXM4-80GB", (8, 0))
CPU = Accelerator("cpu")
BF16 = jnp.bfloat16


@pytest.mark.parametrize(
    ("device", "shape", "kernel"),
    [
        (H100, AttentionShape(128, 128, BF16), "cudnn"),
        (H100, AttentionShape(256, 256, BF16, window=512), "cudnn"),
        (H100, AttentionShape(192, 128, BF16), "cudnn"),
        (A100, AttentionShape(192, 128, BF16), "flash"),
        (B200, AttentionShape(192, 128, BF16), "flash"),
        (B200, AttentionShape(256, 256, BF16), "flash"),
        (H100, AttentionShape(128, 128, BF16, softcap=True), "flash"),
        (H100, AttentionShape(128, 128, BF16, packed=True), "flash"),
        (H100, AttentionShape(128, 128, BF16, window="traced"), "flash"),
        (H100, AttentionShape(128, 128, BF16, context="ring"), "cudnn"),
        (H100, AttentionShape(128, 128, BF16, 99, context="ring"), "flash"),
        (H100, AttentionShape(128, 128, BF16, context="all_gather"), "xla"),
        (H100, AttentionShape(512, 512, BF16), "xla"),
        (H100, AttentionShape(128, 128, jnp.float32), "xla"),
        (CPU, AttentionShape(128, 128, BF16), "xla"),
    ],
)
def test_a_layer_gets_the_first_kernel_that_its_device_can_run(device, shape, kernel):
    choice = choose_attention(shape, device)
    assert choice.kernel == kernel
    assert choice.reason


def test_a_kernel_that_the_device_cannot_run_is_refused_with_all_reasons():
    shape = AttentionShape(200, 200, BF16, softcap=True)
    with pytest.raises(ValueError, match=facts("cudnn", "NVIDIA B200", "200", "128")):
        choose_attention(shape, B200, "cudnn")
    assert choose_attention(shape, B200, "xla").kernel == "xla"


def test_cudnn_of_another_version_decides_too():
    newer = dataclasses.replace(B200, cudnn=91100)
    assert choose_attention(AttentionShape(192, 128, BF16), newer).kernel == "cudnn"
    none = dataclasses.replace(H100, cudnn=None)
    assert choose_attention(AttentionShape(128, 128, BF16), none).kernel == "flash"
