"""Attention kernels on one GPU: which runs, how fast, and how far from float32."""

from __future__ import annotations

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp

from bridge.models import FlashKernel, dot_product_attention
from bridge.models._attention import attend, causal_mask, kernel_of_call
from bridge.models._fused_attention import fused_attention

CASES = {
    "heads of 128": {"width": 128},
    "heads of 128, by the flash kernel": {"width": 128, "flash": True},
    "heads of 64": {"width": 64},
    "heads of 256": {"width": 256},
    "latent attention": {"width": 192, "v_width": 128},
    "window": {"width": 128, "window": 1024},
    "softcap": {"width": 128, "softcap": 50.0},
    "sinks": {"width": 64, "sinks": True},
    "packed": {"width": 128, "packed": 8},
}
"""Features of attention, by name.

`packed` is the number of documents of a row; `flash` takes the kernel of this project
where cuDNN's would be taken.
"""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of attention: rows, tokens, heads and timed calls.

    Attributes:
      rows: Rows of a batch.
      seq: Tokens of a row.
      heads: Query heads; a quarter as many key heads.
      calls: Timed calls of forward and backward.
    """

    rows: int
    seq: int
    heads: int
    calls: int


FULL = Sizes(2, 8192, 16, 10)
REHEARSAL = Sizes(1, 64, 4, 1)
REHEARSED = ("heads of 128", "latent attention", "sinks", "packed")
"""Cases of a rehearsal, which interprets the kernel."""


def measure_attention(sizes: Sizes) -> dict[str, object]:
    """Returns kernel, seconds and errors of each case, forward and backward.

    A kernel that does not compile or run says why, and the others are measured.
    """
    found = {}
    cases = CASES if sizes is FULL else {name: CASES[name] for name in REHEARSED}
    for name, case in cases.items():
        try:
            found[name] = measure_case(sizes, **case)
        except Exception as error:  # noqa: BLE001 - any error is an outcome
            found[name] = {"failed": str(error)[:600]}
    return found


def measure_case(sizes, width, v_width=None, window=None, softcap=None, **rest):
    """One case: the median seconds, and errors relative to float32 on 512 tokens."""
    v_width, packed = v_width or width, rest.get("packed", 0)
    on_cpu = jax.default_backend() == "cpu"  # A rehearsal, of the kernel itself.
    forced = FlashKernel(interpret=on_cpu) if on_cpu or rest.get("flash") else None
    features = {"window": window, "softcap": softcap}

    def given(seq, dtype):
        keys, kv = jax.random.split(jax.random.key(0), 4), max(1, sizes.heads // 4)
        shapes = [(sizes.heads, width), (kv, width), (kv, v_width)]
        shapes.append((sizes.heads, v_width))
        heads = [
            jax.random.normal(key, (sizes.rows, seq, *shape)).astype(dtype)
            for key, shape in zip(keys, shapes, strict=True)
        ]
        documents = jnp.arange(seq, dtype=jnp.int32)[None] * packed // seq
        segments = jnp.broadcast_to(documents, (sizes.rows, seq)) if packed else None
        return heads, segments

    sinks = jnp.linspace(-1.0, 1.0, sizes.heads) if rest.get("sinks") else None
    how = {"scale": width**-0.5, "sinks": sinks, **features}

    def passes(attention):
        def run(heads, segments):
            out, pull = jax.vjp(lambda *qkv: attention(qkv, segments), *heads[:3])
            return out, *pull(heads[3])

        return jax.jit(run)

    def ours(qkv, segments):
        if forced is not None:
            return fused_attention(forced, *qkv, segment_ids=segments, **how)
        return dot_product_attention(*qkv, segment_ids=segments, **how)

    def plain(qkv, segments):
        mask = causal_mask(qkv[0].shape[1], segments, window)
        with jax.default_matmul_precision("highest"):
            return attend(*qkv, how["scale"], mask, softcap, sinks)

    heads, segments = given(sizes.seq, jnp.bfloat16)
    kernel = forced or kernel_of_call(
        heads[0], heads[2], segment_ids=segments, **features
    )
    run, seconds = passes(ours), []
    for _ in range(sizes.calls + 1):
        start = time.perf_counter()
        jax.block_until_ready(run(heads, segments))
        seconds.append(time.perf_counter() - start)
    few, segments = given(min(sizes.seq, 512), jnp.bfloat16)
    exact = passes(plain)([x.astype(jnp.float32) for x in few], segments)
    found = passes(ours)(few, segments)
    median = statistics.median(seconds[1:])
    return {
        "kernel": type(kernel).__name__,
        "median_s": median,
        "tflops": round(_flops(sizes, width, v_width) / median / 1e12, 1),
        "errors": [distance(*pair) for pair in zip(found, exact, strict=True)],
    }


def _flops(sizes, width, v_width):
    """FLOPs of the triangle, forward and backward: two products and five."""
    pairs = sizes.rows * sizes.heads * sizes.seq**2 / 2
    return 2 * pairs * (width + v_width + 3 * width + 2 * v_width)


def distance(found, exact):
    """The norm of a difference relative to that of the exact array."""
    difference = found.astype(jnp.float32) - exact
    return round(float(jnp.linalg.norm(difference) / jnp.linalg.norm(exact)), 5)
