"""What lies in memory follows from the trace, as one works it out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.liveness import fullest
from helpers.llama import RECOMPUTE, Llama, tokens

import fsdp_jax as fsdp
from fsdp_jax.planner._flops import product_flops
from fsdp_jax.planner._memory import predict_memory
from fsdp_jax.planner.liveness._trace import flatten, on_one_device

pytestmark = pytest.mark.versions

SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
BYTES = 64 * 64 * 4


def test_what_products_read_and_write_is_there_as_a_whole():
    def two(x, a, b):
        return jnp.tanh(x @ a) @ b

    # The first product and its tanh; then the tanh and the second product.
    assert fullest(two, *3 * [SQUARE]) == 2 * BYTES


def test_what_is_computed_element_by_element_is_never_there():
    def chain(x):
        return jnp.sum(jnp.exp(x) * 2 + x)

    assert fullest(chain, SQUARE) < 1024


def test_an_exponential_is_there_if_it_has_two_readers():
    def once(x, a):
        return jnp.exp(x @ a).sum(-1)

    def twice(x, a):
        unnormalized = jnp.exp(x @ a)
        return (unnormalized / unnormalized.sum(-1, keepdims=True)).sum(-1)

    assert fullest(once, SQUARE, SQUARE) == BYTES  # The product.
    assert fullest(twice, SQUARE, SQUARE) == 2 * BYTES


def test_what_is_read_through_a_fused_chain_lives_until_then():
    def late(x, a):
        first = x @ a
        chain = jnp.exp(first) * 2
        second = x @ (a @ a)
        return second, chain.sum()

    # The first product waits for its sum while two others are made.
    assert fullest(late, SQUARE, SQUARE) == 3 * BYTES


def test_what_is_updated_in_place_takes_no_room_of_its_own():
    def update(x, a):
        zeros = jnp.zeros((8, 64, 64))
        return jax.lax.dynamic_update_index_in_dim(zeros, x @ a, 3, 0)

    assert fullest(update, SQUARE, SQUARE) == 9 * BYTES


def test_entries_are_scattered_into_the_zeros_that_are_there():
    def scatter(x, a, rows):
        return jnp.zeros_like(x).at[rows].add(x @ a) @ a

    rows = jax.ShapeDtypeStruct((64,), jnp.int32)
    # Two products and one array between them, which is the zeros and then the sum.
    assert fullest(scatter, SQUARE, SQUARE, rows) < 2.1 * BYTES


def test_a_barrier_holds_a_sum_in_the_place_of_its_summands():
    def late(x, a, tie):
        total = tie(x @ a + a @ x)
        third = x @ (a @ a)
        return third, jnp.sin(total).sum()

    # While the last two products are made, both summands wait, or their sum.
    free, tied = lambda y: y, jax.lax.optimization_barrier
    assert fullest(lambda x, a: late(x, a, free), SQUARE, SQUARE) == 4 * BYTES
    assert fullest(lambda x, a: late(x, a, tied), SQUARE, SQUARE) == 3 * BYTES


def test_dead_code_is_no_memory():
    def wasteful(x, a):
        _ = x @ a @ a
        return x @ a

    assert fullest(wasteful, SQUARE, SQUARE) == BYTES


def test_the_work_of_products_in_loops_is_counted_out():
    def looped(x, a):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ a), None), x, length=5)[0]

    program = flatten(jax.make_jaxpr(looped)(SQUARE, SQUARE).jaxpr)
    assert product_flops(program) == 5 * 2 * 64**3


MODEL = Llama(width=128, mlp=512, heads=2, kv_heads=1, layers=6, vocab=512)
TX = optax.adamw(1e-3)


def predicted(prefetch=1, rows=8, num_microbatches=1, **config):
    plan = MODEL.plan(fsdp.make_mesh(), **config)
    step = fsdp.make_train_step(
        plan, MODEL.loss(prefetch), TX, num_microbatches=num_microbatches
    )
    state, batch = fsdp.abstract_state(plan, TX), tokens(rows, 64)
    traced = step.jitted.trace(state, batch).jaxpr
    return plan, predict_memory(plan, state, batch, traced)


def layer_bytes(plan):
    """One layer's unsharded weights in bfloat16, norms left out."""
    rows = [r for r in plan.param_plans if r.unit == "layers" and len(r.shape) > 2]
    matrices = [r for r in rows if "norm" not in r.name]
    return sum(2 * r.shape[1] * r.shape[2] for r in matrices)


def test_stored_bytes_are_exact():
    plan, memory = predicted()
    assert memory.params == plan.bytes_per_device["params"]
    assert memory.optimizer == 2 * memory.params + 4


@pytest.mark.parametrize("prefetch", [1, 2])
def test_one_more_unit_is_gathered_than_is_ahead(prefetch):
    plan, memory = predicted(prefetch)
    # Not counted: the norms, and what belongs to no unit.
    whole = layer_bytes(plan)
    assert (prefetch + 1) * whole <= memory.gathered < (prefetch + 1.2) * whole


def test_microbatches_hold_one_more_gradient():
    plan, once = predicted()
    _, many = predicted(rows=24, num_microbatches=3)
    more = many.gradients - once.gradients
    assert more == pytest.approx(plan.bytes_per_device["grads"], rel=0.1)


def test_what_is_saved_is_what_the_policy_says():
    _, little = predicted(remat_policy=RECOMPUTE)
    _, much = predicted(remat_policy=None)
    # Of each of the 6 layers its input: 64 tokens of 128 in bfloat16.
    assert little.saved == 6 * 64 * 128 * 2
    assert much.saved > 5 * little.saved


def test_a_step_without_a_shard_map_has_no_local_program():
    assert on_one_device(jax.make_jaxpr(jnp.tanh)(SQUARE).jaxpr) is None
