"""Cells of recurrent networks as units: each time step runs them again.

A step gathers them before the loop over time, again for backward, and reduces their
gradients behind it.
"""

from __future__ import annotations

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.blocks import (
    UNIT,
    WIDTH,
    NnxBlock,
    make_list,
    through_list,
    through_modules,
)
from helpers.operations import counts_of
from jax import lax

import fsdp_jax as fsdp

UNITS = 4
TX = optax.adam(1e-2)


class NnxRNN(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(UNITS)])

    def __call__(self, x):
        return through_modules(self, nnx.RNN(self.cell)(x))


class LinenRNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        cells = nn.GRUCell(WIDTH), nn.GRUCell(WIDTH)
        return nn.Bidirectional(*map(nn.RNN, cells))(x)


class EqxRNN(eqx.Module):
    cell: eqx.nn.GRUCell

    def __init__(self, key):
        self.cell = eqx.nn.GRUCell(WIDTH, WIDTH, key=key)

    def __call__(self, x):
        def of_row(row):
            first = jnp.zeros(WIDTH)
            return lax.scan(lambda h, x: (self.cell(x, h),) * 2, first, row)[1]

        return jax.vmap(of_row)(x)


def nested_cell(params, x):
    """A cell in a loop in a loop, the inner one backwards, checkpointed."""

    def again(state, _):
        run = jax.checkpoint(lambda h, row: (UNIT(params["layers"][0], h + row),) * 2)
        return lax.scan(run, state, x.swapaxes(0, 1), reverse=True)

    state, states = lax.scan(again, x[:, 0], length=2)
    return state[None, None] + states


CELLS = {
    "nnx": (
        lambda key: NnxRNN(nnx.Rngs(key)),
        [nnx.GRUCell, NnxBlock],
        lambda m, x: m(x),
    ),
    "linen": (
        lambda key: LinenRNN().init(key, ROWS),
        ["params.GRUCell_*"],
        LinenRNN().apply,
    ),
    "equinox": (EqxRNN, [eqx.nn.GRUCell], lambda m, x: m(x)),
    "nested": (functools.partial(make_list, units=1), ["layers.*"], nested_cell),
}
ROWS = jnp.sin(jnp.arange(16.0 * 5 * WIDTH)).reshape(16, 5, WIDTH)


def planned_cell(form, devices=None, **config):
    make_model, units, run = CELLS[form]
    mesh = fsdp.make_mesh(devices=devices)
    plan = fsdp.fully_shard(make_model, mesh, units, fsdp.FSDPConfig(**config))
    return plan, lambda model, batch: (run(model, batch) ** 2).mean()


def reduced_in_loops(form, **config):
    """How often each iteration reduces, and what a step reduces outside of loops."""
    plan, loss = planned_cell(form, **config)
    step = fsdp.make_train_step(plan, loss, TX)
    trace = step.jitted.trace(fsdp.abstract_state(plan, TX), ROWS).jaxpr
    return counts_of(trace.jaxpr, "reduce_scatter")


@pytest.mark.parametrize("form", CELLS)
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.nothing_saveable])
def test_the_cell_of_an_rnn_is_gathered_and_reduced_once(form, policy):
    plan, _ = planned_cell(form)
    units = [param.unit for param in plan.param_plans]
    own = sum("cell" in unit.lower() or form == "nested" for unit in units)
    in_loops, outside = reduced_in_loops(form, remat_policy=policy)
    assert not in_loops and outside >= own > 0
    # As each iteration did, and does if no units are ordered.
    in_loops, _ = reduced_in_loops(form, remat_policy=policy, prefetch=0)
    assert in_loops >= own


@pytest.mark.each_case  # each framework makes another loop
@pytest.mark.parametrize("form", CELLS)
def test_a_cell_that_is_gathered_once_has_the_gradients_of_one_device(form, caplog):
    plan, loss = planned_cell(form)
    audited = fsdp.audit.audit_loss(plan, loss, ROWS)
    assert max(audited.grad_differences.values()) < 2e-5  # the order of sums
    assert not caplog.records  # Nothing waits in its loop.


def test_a_cell_in_bfloat16_adds_up_its_gradients_in_float32():
    """A sum of equal numbers in bfloat16 stops growing at 256 of them."""
    times = 1024
    plan = fsdp.fully_shard(
        lambda key: {"cell": jnp.zeros((8, WIDTH))},
        fsdp.make_mesh(),
        ["cell"],
        fsdp.FSDPConfig(mp_policy=fsdp.MixedPrecisionPolicy(jnp.bfloat16)),
    )
    cell = fsdp.unit(lambda w, x: (x.astype(w.dtype) @ w).astype(jnp.float32))

    def loss(params, batch):
        def run(total, x):
            return total + cell(params["cell"], x), None

        rows = batch.swapaxes(0, 1)
        return lax.scan(run, jnp.zeros((len(batch), WIDTH)), rows)[0].mean()

    params = fsdp.init_params(plan, jax.random.key(0))
    _, grads = fsdp.value_and_grad(plan, loss)(params, jnp.ones((16, times, 8)))
    np.testing.assert_allclose(grads["cell"], times / WIDTH, rtol=2**-8)


def test_the_weights_of_a_cell_are_not_kept_for_backward(gpus):
    plan, loss = planned_cell("nnx", gpus)
    rows = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype, sharding=plan.batch_sharding)
    step = fsdp.make_train_step(plan, loss, TX)
    compiled = step.lower(fsdp.abstract_state(plan, TX), rows).compile()
    audited = fsdp.audit_step(plan, compiled)
    counts = {(row.op, row.unit): row.arrays for row in audited.rows}
    own = sum(param.unit == "cell" for param in plan.param_plans)
    # Backward reads the kernel of the state alone: rows have no gradients.
    assert counts["all-gather", "cell"] == own + 1
    assert counts["reduce-scatter", "cell"] == own


def cells_in_loop(params, x, cells=2):
    """Cells of several layers in one loop over time, and the states of the last."""

    def body(states, row):
        new = []
        for weights, state in zip(params["layers"], states, strict=False):
            row = UNIT(weights, state + row)
            new.append(row)
        return tuple(new), row

    states = (jnp.zeros_like(x[:, 0]),) * cells
    return lax.scan(body, states, x.swapaxes(0, 1))[1].swapaxes(0, 1)


def cells_among_units(params, x, cells=2):
    first, *layers = params["layers"]
    x = cells_in_loop({"layers": layers}, UNIT(first, x), cells)
    return through_list({"layers": layers[cells:]}, x)


def cells_twice(params, x, cells=2):
    layers = params["layers"]
    x = cells_in_loop({"layers": layers[:cells]}, x, cells)
    return cells_in_loop({"layers": layers[cells : 2 * cells]}, x, cells)


SEVERAL_CELLS = {
    "alone": (cells_in_loop, 2),
    "among units": (cells_among_units, 5),
    "twice": (cells_twice, 4),
}


def planned_cells(form, prefetch, width, devices=None):
    """A plan, with `prefetch` + 1 cells in each loop, and a loss."""
    run, units = SEVERAL_CELLS[form]
    cells, units = prefetch + 1, units * (prefetch + 1) // 2
    make = functools.partial(make_list, width=width, units=units)
    config = fsdp.FSDPConfig(prefetch=prefetch)
    mesh = fsdp.make_mesh(devices=devices)
    plan = fsdp.fully_shard(make, mesh, ["layers.*"], config)
    return plan, lambda model, batch: (run(model, batch, cells) ** 2).mean()


@pytest.mark.each_case  # each form has other units beside its loops
@pytest.mark.parametrize("form", SEVERAL_CELLS)
@pytest.mark.parametrize("prefetch", [1, 2])
def test_several_cells_in_a_loop_are_gathered_and_reduced_once(gpus, form, prefetch):
    plan, loss = planned_cells(form, prefetch, 256, gpus)
    rows = jax.ShapeDtypeStruct((64, 5, 256), jnp.float32, sharding=plan.batch_sharding)
    traced = fsdp.make_train_step(plan, loss, TX).jitted.trace(
        fsdp.abstract_state(plan, TX), rows
    )
    assert counts_of(traced.jaxpr.jaxpr, "all_gather")[0] == 0
    matrices = len(plan.param_plans)
    assert counts_of(traced.jaxpr.jaxpr, "reduce_scatter") == (0, matrices)
    # No more units are unsharded than `prefetch` + 1.
    fsdp.audit_step(plan, traced.lower().compile())


@pytest.mark.parametrize("form", SEVERAL_CELLS)
def test_several_cells_have_the_gradients_of_one_device(form, caplog):
    plan, loss = planned_cells(form, 1, WIDTH)
    audited = fsdp.audit.audit_loss(plan, loss, ROWS)
    assert max(audited.grad_differences.values()) < 2e-5  # the order of sums
    assert not caplog.records  # Nothing waits in its loop.
