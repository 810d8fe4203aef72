"""Ring attention by a fused kernel is that by blocks, for results and gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.compare import worst
from helpers.plain_kernel import PlainKernel
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from bridge.models import FlashKernel
from fsdp_jax import ops

RANKS, ROWS, SEQ, HEADS, KV_HEADS, WIDTH = 4, 1, 64, 2, 1, 16
SEGMENTS = np.repeat([[0, 1, 2]], [9, 43, 12], axis=1).astype(np.int32)
CASES = {
    "cuDNN's passes, with sinks": (PlainKernel(), {"sinks": np.float32([0.5, -1])}),
    "the flash kernel, all at once": (
        FlashKernel(interpret=True),
        {
            "segment_ids": SEGMENTS,
            "window": jnp.int32(21),
            "softcap": 2.0,
            "sinks": np.float32([0.5, -1]),
        },
    ),
}
# Sums of at most 64 numbers of about 1, in float32.
TOLERANCE = 1e-5


def results(how, **options):
    """The output of a ring of four, and the gradients."""
    random = np.random.default_rng(0)
    shapes = [(HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, WIDTH), (HEADS, WIDTH)]
    q, k, v, cotangent = (
        random.normal(size=(ROWS, SEQ, *shape)).astype(np.float32) for shape in shapes
    )
    segments = how.get("segment_ids")
    given = ops.zigzag((q, k, v, cotangent, segments), RANKS)
    static = {name: how.get(name) for name in ("window", "softcap")}
    mesh = fsdp.make_mesh(cp=RANKS, devices=jax.devices()[:RANKS])
    split = P(None, "cp")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(split, P()),
        out_specs=(split, split, P("cp")),
        check_vma=False,
    )
    def run(given, sinks):
        *heads, cotangent, segments = given

        def ring(heads, sinks):
            return ops.ring_attention(
                *heads,
                scale=0.7,
                segment_ids=segments,
                sinks=sinks,
                **static,
                **options,
            )

        out, pull = jax.vjp(ring, heads, sinks)
        of_heads, of_sinks = pull(cotangent)
        return out, of_heads, of_sinks[None]

    return run(given, how["sinks"])


@pytest.mark.parametrize("case", CASES)
def test_it_is_ring_attention_by_blocks(case):
    kernel, how = CASES[case]
    wanted = results(how)
    assert worst(results(how, kernel=kernel), wanted) < TOLERANCE
    # A control: the ring notices its sinks.
    assert worst(results({**how, "sinks": -how["sinks"]}), wanted) > 100 * TOLERANCE
