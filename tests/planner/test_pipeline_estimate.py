"""A estimate of a pipeline: what waits, what lies in memory, what its plan prints."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fsdp_jax as fsdp

LAYERS, EMBED, MLP, VOCAB, SEQ, STAGES = 5, 1024, 4096, 8192, 512, 2


def make_weights(key):
    del key
    return {
        "embed": jnp.zeros((VOCAB, EMBED)),
        "layers": {
            "up": jnp.zeros((LAYERS, EMBED, MLP)),
            "down": jnp.zeros((LAYERS, MLP, EMBED)),
        },
    }


def layer(w, x):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def loss_fn(weights, tokens):
    x, _ = fsdp.scan(layer, weights["layers"], weights["embed"][tokens], prefetch=1)
    logits = x @ weights["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def plan_of(**config):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    return fsdp.fully_shard(
        make_weights,
        fsdp.make_mesh(pp=STAGES),
        [fsdp.Stacked("layers")],
        fsdp.FSDPConfig(mp_policy=policy, **config),
    )


@functools.cache
def estimate(microbatches):
    tokens = jax.ShapeDtypeStruct((16 * microbatches, SEQ), jnp.int32)
    tx = optax.adamw(1e-3)
    options = {"guide": False, "num_microbatches": microbatches}
    return fsdp.estimate_step(plan_of(), loss_fn, tx, tokens, gpus=8, **options)


def of_turns(found):
    """Seconds of computation but for the optimizer's."""
    spans = [s for s in found.timeline.compute if s.name != "optimizer"]
    return sum(span.end - span.start for span in spans)


@pytest.mark.plan
def test_stages_wait_for_the_first_and_the_last_microbatch():
    few, many = estimate(4), estimate(12)
    assert (few.bubble, many.bubble) == (pytest.approx(1 / 5), pytest.approx(1 / 13))
    assert "pipeline: 20.0% of a stage's turns are empty" in repr(few)
    # As long as all stages one after the other take: one microbatch more than it has.
    assert of_turns(many) / of_turns(few) == pytest.approx(13 / 5, rel=0.03)
    over_pp = [row for row in few.sent if row.axes == ("pp",)]
    assert "collective-permute" in {row.op for row in over_pp}


@pytest.mark.plan
def test_memory_of_a_stage_is_predicted_and_does_not_grow_with_microbatches():
    few, many = estimate(4), estimate(12)
    tokens = 8 * 4 * SEQ * 4  # Bytes of the batch that lie on a device besides.
    assert many.compiled_bytes - few.compiled_bytes <= tokens
    for found in (few, many):
        assert found.memory.total == pytest.approx(found.compiled_bytes, rel=0.15)


def test_a_plan_says_what_stages_have_wait_for_gather_and_send():
    text = repr(plan_of(pipeline=fsdp.PipelineConfig("1f1b", virtual_stages=2)))
    up = 2 * EMBED * MLP  # Elements of a layer.
    for line in (
        "pipeline, 1f1b: 2 stages of 3 or 2 layers in 2 chunk(s)",
        "a stage waits 11.1% of a step with 4 microbatches",
        f"with zero_dp_strategy=2 once a step, to hold {4 * up * 2 / 2**20:.2f} MiB",
        "5 layers are stored as 8, of which 3 are zeros that no stage runs",
        "weights and gradients over pp each step",
    ):
        assert line in text
    assert "dim 0 over pp, padded 5 to 8, dim 1 over dp_shard" in text
    held = plan_of(zero_dp_strategy=2)
    assert "has its layers unsharded during a step" in repr(held)
    # A stage holds its own layers alone, and of all else its part.
    rows = {
        param.name: param.num_elements(held.mesh, param.placements.optimizer)
        for param in held.param_plans
    }
    assert rows == {
        "embed": VOCAB * EMBED // 8,
        "layers.up": 3 * EMBED * MLP // 4,
        "layers.down": 3 * EMBED * MLP // 4,
    }
    assert np.prod(held.packed_params["layers"]["up"].value.shape) == 6 * EMBED * MLP
