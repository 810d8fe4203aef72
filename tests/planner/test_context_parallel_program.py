"""A decoder over cp, compiled for GPUs: what goes round is hidden behind attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from bridge.models import DecoderConfig
from fsdp_jax.cli._context_parallel import abstract_rows
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import fused_next_token_loss
from fsdp_jax.planner import estimate_step
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS

pytestmark = pytest.mark.plan

CP, LAYERS, SEQ = 4, 2, 16384
CONFIG = DecoderConfig(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def estimate():
    jax.config.update("jax_disable_most_optimizations", False)
    mesh = fsdp.make_mesh(cp=CP, devices=gpu_devices(GPUS["h200"], CP))
    config = fsdp.FSDPConfig(
        mp_policy=fsdp.MixedPrecisionPolicy(
            param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.bfloat16
        ),
        remat_policy=jax.checkpoint_policies.save_only_these_names("context_attention"),
    )
    plan = plan_decoder(CONFIG, mesh, config)
    batch = abstract_rows(1, SEQ, CP)
    yield estimate_step(
        plan, fused_next_token_loss, optax.adamw(1e-3), batch, tokens=SEQ, guide=False
    )
    jax.config.update("jax_disable_most_optimizations", True)


def ring(estimate):
    return [row for row in estimate.sent if row.op == "collective-permute"]


def test_the_steps_of_a_ring_are_hidden_behind_attention(estimate):
    rows = ring(estimate)
    communicated = sum(row.times * row.seconds for row in rows)
    waited_for = sum(row.exposed_seconds for row in rows)
    assert waited_for < 0.05 * communicated
    assert {row.axes for row in rows} == {("cp",)}
    assert {row.unit for row in rows} == {"-"}


def test_a_ring_sends_keys_and_values_no_oftener_than_it_must(estimate):
    part = SEQ // CP * CONFIG.num_key_value_heads * CONFIG.head_dim
    sent = sum(row.times * row.bytes for row in ring(estimate))
    # Keys and values in two bytes on all but the last step, forward and backward, which
    # does not attend again, as what forward made is kept; their gradients in four
    # bytes, and in two when all is added up, home.
    once = 2 * 2 * (CP - 1) + 4 * (CP - 1) + 2
    assert sent == LAYERS * 2 * part * once


def test_the_program_does_what_the_plan_says(estimate):
    fsdp.audit_step(estimate.plan, estimate.compiled)


def test_a_collective_of_one_s_own_over_cp_is_still_told():
    """The audit knows what attention sends by its scope, and nothing else."""
    devices = gpu_devices(GPUS["h200"], CP)
    plan = plan_decoder(CONFIG, fsdp.make_mesh(cp=CP, devices=devices))

    def loss(model, batch):
        states, _ = model.final_states(batch["tokens"])
        whole = jax.lax.all_gather(states, "cp", axis=1, tiled=True)
        return jnp.mean(whole**2)

    step = fsdp.make_train_step(plan, loss, optax.adamw(1e-3))
    like = fsdp.abstract_state(plan, optax.adamw(1e-3))
    lowered = step.lower(like, abstract_rows(1, SEQ, CP))
    with pytest.raises(fsdp.audit.AuditError, match=facts("all-gather", "cp")):
        fsdp.audit_step(plan, lowered)


def test_memory_is_estimated(estimate):
    # Of blocks of scores more lie about than the trace says, and here they are a third.
    assert estimate.memory.total == pytest.approx(estimate.compiled_bytes, rel=0.22)
