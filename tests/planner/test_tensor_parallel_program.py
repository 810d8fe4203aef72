"""A decoder over tp, compiled for GPUs: tokens cross tp as planned, matrices never."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import fsdp_jax as fsdp
from bridge.models import DecoderConfig
from fsdp_jax.cli._model import fused_next_token_loss, plan_decoder
from fsdp_jax.planner import compile_for
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS

pytestmark = pytest.mark.plan

TP, LAYERS, ROWS, SEQ = 4, 4, 2, 512
CONFIG = DecoderConfig(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=LAYERS,
    num_attention_heads=16,
    num_key_value_heads=8,
)


@pytest.fixture(scope="module")
def forecast():
    jax.config.update("jax_disable_most_optimizations", False)
    mesh = fsdp.make_mesh(tp=TP, devices=gpu_devices(GPUS["h200"], 8))
    config = fsdp.FSDPConfig(
        mp_policy=fsdp.MixedPrecisionPolicy(
            param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.bfloat16
        ),
        remat_policy=jax.checkpoint_policies.nothing_saveable,
    )
    plan = plan_decoder(CONFIG, mesh, config)
    batch = jax.ShapeDtypeStruct((2 * ROWS, SEQ + 1), jnp.int32)
    yield compile_for(
        plan, fused_next_token_loss, optax.adamw(1e-3), batch, guide=False
    )
    jax.config.update("jax_disable_most_optimizations", True)


def test_tokens_cross_tp_as_often_as_a_layer_asks(forecast):
    tokens = ROWS * SEQ * CONFIG.hidden_size * 2 * (TP - 1) // TP
    sent = dict.fromkeys(("all-gather", "reduce-scatter"), 0.0)
    for row in forecast.sent:
        if row.axes == ("tp",) and row.times >= LAYERS - 1:
            if row.op in sent:
                sent[row.op] += row.times * row.bytes / tokens
            else:  # Gradients of norms.
                assert row.bytes < tokens / 100
    # Forward gathers what both parts of a layer read and scatters what both made; with
    # nothing kept, backward does so again, but for the last sum, which nobody needs;
    # and it gathers and scatters the gradients of these.
    assert sent["all-gather"] == pytest.approx(6 * LAYERS, rel=0.01)
    assert sent["reduce-scatter"] == pytest.approx(5 * LAYERS, rel=0.01)


def test_weights_are_gathered_over_data_axes_at_tp_width(forecast):
    stacked = [row for row in forecast.plan.rows if row.num_stacked]
    width = sum(
        2 * row.num_elements(forecast.plan.mesh, ()) // LAYERS for row in stacked
    )
    gathered = sum(
        row.times * row.bytes
        for row in forecast.sent
        if row.axes == ("dp_shard",) and row.op == "all-gather" and row.unit == "layers"
    )
    # Two data ranks send half of each layer; forward and backward, and one in advance.
    assert 2 * LAYERS <= gathered / (width / 2) <= 2 * LAYERS + 1
    fsdp.audit(forecast.plan, forecast.compiled)


def test_a_table_tells_what_crosses_tp(forecast):
    assert {"tp", "dp_shard"} <= {axis for row in forecast.sent for axis in row.axes}
    assert {row.unit for row in forecast.sent if row.axes == ("tp",)} == {"-"}
    assert "as if each rank of tp held all" in repr(forecast)
    assert forecast.memory.total > forecast.compiled_bytes
    assert 0.05 < forecast.mfu < 1 and "(dp_shard=2, tp=4)" in repr(forecast)
