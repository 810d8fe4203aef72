"""Compiled for GPUs, weights in eight bits halve what gathers send, and stay hidden."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.llama import Llama, tokens

import fsdp_jax as fsdp

pytestmark = pytest.mark.plan

TX = optax.adamw(1e-3)
MODEL = Llama(layers=4)
FORMATS = {
    "bfloat16": None,
    "float8": fsdp.sharding.Float8Gather(),
    "mxfp8": fsdp.sharding.MXFP8Gather(),
}


@pytest.fixture(scope="module")
def estimates():
    """One compiled step for each format."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield {kind: estimate(kind) for kind in FORMATS}
    jax.config.update("jax_disable_most_optimizations", True)


def estimate(kind):
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16,
        grad_comm_dtype=jnp.bfloat16,
        param_gather=FORMATS[kind],
    )
    plan = MODEL.plan(fsdp.make_mesh(devices=jax.devices()[:1]), mp_policy=policy)
    options = {"gpus": 8, "guide": False}
    return fsdp.estimate_step(plan, MODEL.loss(), TX, tokens(8), **options)


def gathers(found):
    """What units gather, in the loops over them."""
    return [
        r for r in found.sent if r.op == "all-gather" and r.unit in ("layers", "head")
    ]


def test_at_most_052_of_the_bytes_of_bfloat16_are_communicated(estimates):
    sent = {
        kind: sum(row.bytes * row.times for row in gathers(found))
        for kind, found in estimates.items()
    }
    for kind in ("float8", "mxfp8"):
        assert {row.dtype for row in gathers(estimates[kind])} == {"u8"}
        assert 0.5 <= sent[kind] / sent["bfloat16"] <= 0.52
    assert {row.dtype for row in gathers(estimates["bfloat16"])} == {"bf16"}


def test_gradients_are_communicated_as_before(estimates):
    def reductions(found):
        return sorted(
            (row.dtype, row.bytes, row.times)
            for row in found.sent
            if row.op == "reduce-scatter"
        )

    want = reductions(estimates["bfloat16"])
    assert want and {dtype for dtype, _, _ in want} == {"bf16"}
    assert reductions(estimates["float8"]) == reductions(estimates["mxfp8"]) == want


def test_gathers_of_bytes_are_hidden_and_as_planned(estimates):
    for kind in ("float8", "mxfp8"):
        found = estimates[kind]
        fsdp.audit_step(found.plan, found.compiled)
        # 1.2e-4 s by the model of links, of a step of several ms; 2.2e-4 with jax 0.12.
        assert sum(row.exposed_seconds for row in gathers(found)) < 3e-4
        assert found.exposed < estimates["bfloat16"].exposed


def test_memory_is_predicted_with_the_encoded_pieces(estimates):
    plain = estimates["bfloat16"].memory.gathered
    for kind in ("float8", "mxfp8"):
        found = estimates[kind]
        # The prediction is 6 % above what XLA assigns.
        assert found.memory.total == pytest.approx(found.compiled_bytes, rel=0.08)
        # At the fullest moment those of the head are no longer needed.
        more = found.memory.gathered - plain
        assert 0.5 * found.plan.quantized_bytes < more <= found.plan.quantized_bytes
