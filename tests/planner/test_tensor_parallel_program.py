"""A decoder over tp, compiled for GPUs: tokens cross tp as planned, matrices never."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.llama import BF16, Llama, tokens

import fsdp_jax as fsdp
from bridge.models import DecoderConfig
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import fused_next_token_loss
from fsdp_jax.cli._sharding_options import Strategy
from fsdp_jax.planner import estimate_step
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


TX = optax.adamw(1e-3)
BATCH, MANY = (
    jax.ShapeDtypeStruct((2 * rows, SEQ + 1), jnp.int32) for rows in (ROWS, 16 * ROWS)
)


@pytest.fixture(scope="module", autouse=True)
def optimized():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def decoder(tp=TP, remat="nothing", batch=BATCH, layers=LAYERS, **options):
    mesh = fsdp.make_mesh(tp=tp, devices=gpu_devices(GPUS["h200"], 8))
    config = Strategy(remat=remat).applied(fsdp.FSDPConfig(mp_policy=BF16), mesh)
    sizes = dataclasses.replace(CONFIG, num_hidden_layers=layers)
    plan = plan_decoder(sizes, mesh, config, **options)
    return estimate_step(plan, fused_next_token_loss, TX, batch, guide=False)


@pytest.fixture(scope="module")
def estimate():
    return decoder()


def test_tokens_cross_tp_as_often_as_a_layer_asks(estimate):
    tokens = ROWS * SEQ * CONFIG.hidden_size * 2 * (TP - 1) // TP
    sent = dict.fromkeys(("all-gather", "reduce-scatter"), 0.0)
    for row in estimate.sent:
        if row.axes == ("tp",) and row.times >= LAYERS - 1:
            if row.op in sent:
                sent[row.op] += row.times * row.bytes / tokens
            else:  # Gradients of norms.
                assert row.bytes < tokens / 100
    # Forward gathers what both parts of a layer read and scatters what both made; with
    # nothing kept, backward does so again, but for the last sum, which nobody needs;
    # and it gathers and scatters the gradients of these. The head gathers once in each.
    assert sent["all-gather"] == pytest.approx(6 * LAYERS + 2, rel=0.01)
    assert sent["reduce-scatter"] == pytest.approx(5 * LAYERS, rel=0.01)


def test_weights_are_gathered_over_data_axes_at_tp_width(estimate):
    stacked = [param for param in estimate.plan.param_plans if param.num_stacked]
    width = sum(
        2 * param.num_elements(estimate.plan.mesh, ()) // LAYERS for param in stacked
    )
    gathered = sum(
        row.times * row.bytes
        for row in estimate.sent
        if (row.axes, row.op, row.unit) == (("dp_shard",), "all-gather", "layers")
    )
    # Two data ranks send half of each layer; forward and backward, and one in advance.
    assert 2 * LAYERS <= gathered / (width / 2) <= 2 * LAYERS + 1
    fsdp.audit_step(estimate.plan, estimate.compiled)


def test_a_table_tells_what_crosses_tp(estimate):
    assert {"tp", "dp_shard"} <= {axis for row in estimate.sent for axis in row.axes}
    assert {row.unit for row in estimate.sent if row.axes == ("tp",)} == {"-"}
    assert 0.02 < estimate.mfu < 1 and "(dp_shard=2, tp=4)" in repr(estimate)


def unconstrained():
    """A model that says how its matrices are split, and of its tokens nothing."""
    columns, rows = ("q", "k", "v", "gate", "up"), ("o", "down")
    rules = {f"layers.{name}": 1 for name in columns}
    rules |= {f"layers.{name}": 0 for name in rows} | {"head": 1}
    model = Llama(width=1024, mlp=2816, heads=8, kv_heads=8, vocab=16000)
    mesh = fsdp.make_mesh(tp=TP, devices=gpu_devices(GPUS["h200"], 8))
    plan = model.plan(mesh, tensor_parallel=rules)
    return estimate_step(plan, model.loss(), TX, tokens(8, 1024), guide=False)


COMPILED = {
    "one prefetched": None,
    "none prefetched": functools.partial(decoder, prefetch=0),
    "no data axis": functools.partial(decoder, tp=8),
    # Of the sums over tp that are saved each rank has its part.
    "products saved": functools.partial(decoder, remat="dots", batch=MANY, layers=16),
    "all saved": functools.partial(decoder, remat="all", batch=MANY, layers=16),
    "unconstrained": unconstrained,
}


@pytest.mark.parametrize("name", COMPILED)
def test_memory_is_predicted_within_10_percent_of_what_xla_assigns(name, estimate):
    make = COMPILED[name]
    found = make() if make else estimate
    assert found.memory.total == pytest.approx(found.compiled_bytes, rel=0.1)
    assert found.memory.params == found.plan.bytes_per_device["params"]
