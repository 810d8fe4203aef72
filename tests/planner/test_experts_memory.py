"""Predicted memory of models with experts is what XLA for GPUs allots."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.experts import EMBED, EXPERTS, LAYERS, WIDTH, plan_of
from helpers.liveness import fullest

import fsdp_jax as fsdp
from bridge.models import DecoderConfig, MoEConfig, RopeConfig
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import next_token_loss
from fsdp_jax.cli._routing import Routing
from fsdp_jax.planner import _memory
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._memory import predict_memory
from fsdp_jax.planner._transposed_copies import transposed_bytes
from fsdp_jax.planner.liveness._trace import flatten

GROUPS, ROWS, DIM = 4, 64, 32
BYTES = 4 * ROWS * DIM
X = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
KERNEL = jax.ShapeDtypeStruct((GROUPS, DIM, DIM), jnp.float32)
SIZES = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)


def test_a_ragged_product_reads_its_rows_once_per_group():
    # In two orders of dims, beside which the result is small.
    assert fullest(jax.lax.ragged_dot, X, KERNEL, SIZES) == 2 * GROUPS * BYTES
    one = jax.ShapeDtypeStruct((1, DIM, DIM), jnp.float32)
    sizes = jax.ShapeDtypeStruct((1,), jnp.int32)
    assert fullest(jax.lax.ragged_dot, X, one, sizes) == BYTES


def test_a_product_and_its_gradient_share_the_rows_of_each_group():
    def gradient(x, kernel, sizes):
        def product(kernel):
            return jax.lax.ragged_dot(x, kernel, sizes)

        y, pullback = jax.vjp(product, kernel)
        return pullback(y)

    # The rows and the gradient of the result, once per group; and its sum by group.
    of_weights = 4 * GROUPS * DIM * DIM
    assert fullest(gradient, X, KERNEL, SIZES) == 2 * GROUPS * BYTES + of_weights


def test_what_is_computed_on_gpus_is_part_of_the_program_around_it():
    def product(x):
        return x @ x.T @ x

    def dependent(x):
        return jax.lax.platform_dependent(x, cuda=product, default=jnp.sin)

    names = [one.name for one in flatten(jax.make_jaxpr(dependent)(X).jaxpr).operations]
    assert names.count("dot_general") == 2
    assert not {"cond", "sin"} & set(names)
    assert fullest(dependent, X) == fullest(product, X)


@pytest.mark.parametrize(("ep", "experts_a_rank"), [(4, 2), (8, 1)])
def test_experts_beside_others_that_are_split_further_have_a_transposed_copy(
    ep, experts_a_rank
):
    plan = plan_of(fsdp.make_mesh(ep=ep))
    assert EXPERTS // ep == experts_a_rank
    # Up, down and bias of an expert in float32, and its 3 gains with one of padding.
    split = 4 * LAYERS * experts_a_rank * (2 * EMBED * WIDTH + WIDTH + 4) // 2
    # A rank's only expert is not split, nor would it be gathered along an inner dim.
    assert transposed_bytes(plan) == (split if experts_a_rank > 1 else 0)


RANKS, SEQ, EP = 8, 2048, 4
SMALL = DecoderConfig(
    vocab_size=2048,
    hidden_size=1024,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=SEQ,
    rope=RopeConfig(rope_theta=1e4),
    moe=MoEConfig(num_experts=16, num_experts_per_tok=4, intermediate_size=1024),
)
DISPATCHES = {"dropless": None, "capacity": 1.0}
BOUNDS = {"dropless": (0.9, 1.1), "capacity": (0.95, 1.12)}
"""Of the prediction over what is assigned. XLA orders operations by estimates of their
seconds, which a trace does not have: weight gradients wait for the exchanges of rows
with a capacity in large models, and do not for the short ones of this."""


def is_within(dispatch, prediction, assigned):
    low, high = BOUNDS[dispatch]
    return low <= prediction / assigned <= high


@pytest.fixture(autouse=True)
def all_optimizations():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


TX = optax.adamw(1e-3)
BATCH = jax.ShapeDtypeStruct((RANKS, SEQ + 1), jnp.int32)


@functools.cache
def plan_with(dispatch):
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.bfloat16
    )
    config = fsdp.FSDPConfig(
        mp_policy=policy, remat_policy=jax.checkpoint_policies.nothing_saveable
    )
    routing = Routing(capacity_factor=DISPATCHES[dispatch], router_dtype="model")
    mesh = fsdp.make_mesh(ep=EP, devices=gpu_devices(GPUS["h200"], RANKS))
    return plan_decoder(SMALL, mesh, config, routing, unroll=2)


def predicted(dispatch):
    """The prediction of the step; no XLA is run."""
    plan = plan_with(dispatch)
    step = fsdp.make_train_step(plan, next_token_loss, TX)
    state = fsdp.abstract_state(plan, TX)
    traced = step.jitted.trace(state, BATCH).jaxpr
    return predict_memory(plan, state, BATCH, traced).total


@functools.cache
def compiled(dispatch):
    """What XLA for GPUs assigns, and the prediction beside it."""
    plan = plan_with(dispatch)
    found = fsdp.estimate_step(plan, next_token_loss, TX, BATCH, guide=False)
    return found.compiled_bytes, found.memory.total


@pytest.mark.plan
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_memory_of_experts_is_predicted_as_xla_assigns_it(dispatch):
    assigned, prediction = compiled(dispatch)
    assert is_within(dispatch, prediction, assigned)


@pytest.mark.plan
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_prediction_in_the_order_of_the_trace_would_be_noticed(dispatch, monkeypatch):
    assigned, prediction = compiled(dispatch)
    assert predicted(dispatch) == prediction
    monkeypatch.setattr(_memory, "as_run", lambda body, loop, weights: body)
    monkeypatch.setattr(_memory, "transposed_bytes", lambda plan: 0)
    assert not is_within(dispatch, predicted(dispatch), assigned)
