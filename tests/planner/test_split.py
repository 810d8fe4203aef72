"""What a trace tells of an axis that is left to XLA is what XLA makes of it."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax.planner.liveness._operations import MOVE, SLICE
from fsdp_jax.planner.liveness._schedule_order import as_run
from fsdp_jax.planner.liveness._tp_propagation import dim_of
from fsdp_jax.planner.liveness._trace import on_one_device

P = PartitionSpec
TP = 4
X, Y, HEADS = (2, 16, 32), (2, 16, 32), (2, 16, 8, 4)
TOKENS, FEATURES = P(None, "tp"), P(None, None, "tp")


@pytest.fixture(scope="module")
def mesh():
    return fsdp.make_mesh(tp=TP)


def likes(mesh, *given):
    """Of `(shape, spec)` pairs."""
    return [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in given
    ]


def program_of(mesh, fn, *given):
    """The program of one device, `tp` left to XLA as in a step."""
    whole = P()
    local = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
        axis_names=set(mesh.axis_names) - {"tp"},
        check_vma=False,
    )
    jaxpr = jax.make_jaxpr(local)(*likes(mesh, *given)).jaxpr
    program = on_one_device(jaxpr, [dim_of(spec) for _, spec in given])
    assert program is not None
    return program


def shapes_of(program):
    """Of its results, on one device."""
    return [value.shape for value in program.outputs if value is not None]


def looped(x, w):
    """A carry that begins as zeros, and tokens stacked."""

    def body(total, row):
        made = row @ w
        return total + made, jnp.tanh(made)

    return lax.scan(body, jnp.zeros((16, 32)), x)


def constrained(x):
    return lax.with_sharding_constraint(jnp.sin(x), TOKENS)


COLUMNS, ROWS = ((32, 32), P(None, "tp")), ((32, 32), P("tp"))
FUNCTIONS = {
    "a product by columns": (jnp.matmul, (X, P()), COLUMNS),
    "a product by rows, reduced": (jnp.matmul, (X, FEATURES), ROWS),
    "a product of some tokens": (jnp.matmul, (X, TOKENS), ((32, 32), P())),
    "products by columns and by rows": (
        lambda x, a, b: jnp.tanh(x @ a) @ b,
        *((X, P()), COLUMNS, ROWS),
    ),
    "heads told apart": (lambda x: x.reshape(HEADS), (X, FEATURES)),
    "heads brought together": (lambda x: x.reshape(X), (HEADS, FEATURES)),
    "tokens of one row": (lambda x: x.reshape(16, 32), ((1, 16, 32), TOKENS)),
    "dims in another order": (lambda x: x.transpose(1, 2, 0), (X, TOKENS)),
    "a mean over features": (lambda x: x.mean(-1), (X, TOKENS)),
    "a sum over what is split": (lambda x: x.sum(1), (X, TOKENS)),
    "a scale for all tokens": (lambda x, s: x * s, (X, TOKENS), ((1, 1, 32), P())),
    "a half": (lambda x: x[..., :16], (X, TOKENS)),
    "halves in the other order": (
        lambda x: jnp.concatenate([x[..., 16:], x[..., :16]], -1),
        (X, TOKENS),
    ),
    "whole and split": (lambda x, y: x + y, (X, P()), (Y, TOKENS)),
    "columns taken at indices": (
        lambda table: table[jnp.arange(8) % 3],
        ((64, 32), P(None, "tp")),
    ),
    "rows taken at indices of some tokens": (
        lambda table, ids: table[ids.astype(jnp.int32)],
        ((64, 32), P()),
        ((2, 16), TOKENS),
    ),
    "a loop": (looped, (X, P()), COLUMNS),
    "a constraint": (constrained, (X, P())),
    "a constraint that gathers": (
        lambda x: lax.with_sharding_constraint(x * 2, P(None, None, None)),
        (X, TOKENS),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_lie_on_devices_as_xla_lays_them(name, mesh):
    fn, *given = FUNCTIONS[name]
    with jax.set_mesh(mesh):
        compiled = jax.jit(fn).lower(*likes(mesh, *given)).compile()
        shapes = jax.tree.leaves(jax.eval_shape(fn, *likes(mesh, *given)))
    shardings = jax.tree.leaves(compiled.output_shardings)
    laid = [
        sharding.shard_shape(out.shape)
        for out, sharding in zip(shapes, shardings, strict=True)
    ]
    program = program_of(mesh, fn, *given)
    assert shapes_of(program) == laid


def test_what_no_rule_covers_counts_as_unsharded(mesh):
    # Three heads do not divide over four ranks; rows do not stand one after the other.
    for shape, given in (((2, 16, 3, 4), FEATURES), ((32, 32), TOKENS)):
        program = program_of(
            mesh,
            lambda x, shape=shape: x.reshape(shape),
            ((2, 16, math.prod(shape) // 32), given),
        )
        assert shapes_of(program) == [shape]


def test_within_a_shard_map_over_tp_the_same_array_is_a_ranks_own(mesh):
    def local(x):
        doubled = jax.shard_map(
            lambda x: x @ x.T,
            in_specs=P("tp"),
            out_specs=P("tp"),
            axis_names={"tp"},
            check_vma=False,
        )
        return doubled(x)

    program = program_of(mesh, local, ((64, 32), P("tp")))
    (product,) = (op for op in program.operations if op.name == "dot_general")
    assert product.outputs == program.outputs
    assert product.outputs[0].shape == (16, 16)
    assert not {op.name for op in program.operations} & {MOVE, SLICE}


def test_tokens_of_all_ranks_are_there_besides_those_of_one(mesh):
    def gathered(x, w):
        return lax.with_sharding_constraint(x, P(None, None, None)) @ w

    program = program_of(mesh, gathered, (X, TOKENS), COLUMNS)
    sizes = {op.name: [v.bytes for v in op.outputs] for op in program.operations}
    size = math.prod(X) * 4
    assert sizes == {MOVE: [size], "dot_general": [size // TP]}


def test_the_gradient_of_a_table_is_made_in_parts(mesh):
    def grad(table, cotangent):
        take = jax.vjp(lambda table: table[jnp.arange(8) % 3], table)[1]
        part = jax.shard_map(
            jnp.sin,
            in_specs=P("tp"),
            out_specs=P("tp"),
            axis_names={"tp"},
            check_vma=False,
        )
        return part(take(cotangent)[0] * 2)

    program = program_of(mesh, grad, ((64, 32), P("tp")), ((8, 32), P()))
    (scattered,) = (op for op in program.operations if op.name == "scatter-add")
    assert scattered.outputs[0].shape == (16, 32)


@pytest.fixture(scope="module")
def backward(mesh):
    """The loop over layers that makes the gradients of their weights."""

    def layer(x, w):
        x = lax.with_sharding_constraint(x, P(None, None, None))
        return lax.with_sharding_constraint(jnp.tanh(x @ w), TOKENS), None

    def grads(x, stack):
        return jax.grad(lambda stack: lax.scan(layer, x, stack)[0].sum())(stack)

    program = program_of(mesh, grads, (X, TOKENS), ((3, 32, 32), P()))
    return [op for op in program.operations if op.name == "scan"][-1]


OF_TOKENS, OF_WEIGHTS = (2, 4, 32), (32, 32)


def products(body):
    return [op.outputs[0].shape for op in body.operations if op.name == "dot_general"]


def test_gradients_of_weights_are_made_when_nothing_waits_for_them(backward):
    (body,) = backward.bodies
    assert sorted(products(body)) == [OF_TOKENS, OF_WEIGHTS]
    assert products(as_run(body, backward, {OF_WEIGHTS})) == [OF_TOKENS, OF_WEIGHTS]
    assert products(as_run(body, backward, {OF_TOKENS})) == [OF_WEIGHTS, OF_TOKENS]


def test_where_a_loop_is_unrolled_they_wait_for_the_next_layer(backward):
    (body,) = backward.bodies
    unrolled = dataclasses.replace(backward, params={"unroll": 2})
    run = as_run(body, unrolled, {OF_WEIGHTS})
    assert products(run) == [OF_TOKENS, OF_TOKENS, OF_WEIGHTS, OF_WEIGHTS]
    there = {None, *run.inputs}
    for operation in run.operations:
        assert there.issuperset(operation.inputs)
        assert there.isdisjoint(operation.outputs)
        there |= set(operation.outputs)
    assert there.issuperset(run.outputs)


def test_without_communication_a_loop_runs_as_it_is_written(mesh):
    program = program_of(mesh, looped, (X, P()), COLUMNS)
    (loop,) = (op for op in program.operations if op.name == "scan")
    (body,) = loop.bodies
    assert as_run(body, loop, {(16, 8)}) is body
