"""Products of experts on one GPU: ours beside jax's own, and how far apart they are."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from bridge.models import float8_grouped_matmul, grouped_matmul

PRODUCTS = {
    "ragged_dot": jax.lax.ragged_dot,
    "grouped_matmul": grouped_matmul,
    "float8_grouped_matmul": float8_grouped_matmul,
}
FULL = (32768, 8, 2048, 2048)
REHEARSAL = (512, 4, 16, 32)
"""Rows, groups, embed, width."""
CALLS = 10


def measure_experts(sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """Seconds of forward and backward, and distances from jax's own.

    Args:
      sizes: Rows, groups, embed, width.
    """
    rows, groups, embed, width = sizes
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, embed), jnp.bfloat16)
    kernel = jax.random.normal(keys[1], (groups, embed, width), jnp.bfloat16)
    # As tokens choose: some groups have many rows, one has none.
    ends = jnp.sort(jax.random.randint(keys[2], (groups - 2,), 0, rows))
    ends = jnp.array([0, *ends.tolist(), rows])
    group_sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)

    def of(product):
        def loss(x, kernel):
            made = product(x, kernel, group_sizes).astype(jnp.float32)
            return jnp.square(made).mean(), made

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    found: dict[str, Any] = {"rows_groups_embed_width": sizes}
    results = {}
    for name, product in PRODUCTS.items():
        run_once, seconds = of(product), []
        for _ in range(CALLS + 1):
            start = time.perf_counter()
            results[name] = jax.block_until_ready(run_once(x, kernel))
            seconds.append(time.perf_counter() - start)
        found[name] = {
            "median_s": statistics.median(seconds[1:]),
            "worst_difference": _distance(results[name], results["ragged_dot"]),
        }
    return found


def _distance(found, exact):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    return max(
        float(jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b))
        for a, b in pairs
    )
