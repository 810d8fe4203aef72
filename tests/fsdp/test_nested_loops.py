"""Loops over stacks of units within loops: groups of layers, and parts of a stack.

Each layer is gathered ahead, and none is gathered once for all iterations of the outer
loop, as jax and XLA would.
"""

from __future__ import annotations

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.blocks import UNIT, WIDTH, make_list
from jax import lax

import fsdp_jax as fsdp

GROUPS, LAYERS = 2, 3
TX = optax.adam(1e-2)


def make_stack(key, width=WIDTH, dims=(GROUPS, LAYERS)):
    layers = make_list(key, width, GROUPS * LAYERS)["layers"]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return {"layers": jax.tree.map(lambda x: x.reshape(*dims, *x.shape[1:]), stacked)}


def make_groups(key, width=WIDTH):
    """Groups of a layer of its own and a stack, as local and global attention."""
    (first,) = make_stack(key, width, (GROUPS * LAYERS,)).values()
    return {
        "own": jax.tree.map(lambda x: x[:GROUPS], first),
        "layers": make_stack(key, width)["layers"],
    }


make_one_dim = functools.partial(make_stack, dims=(GROUPS * LAYERS,))


def through(layers, x):
    return lax.scan(lambda x, w: (UNIT(w, x), None), x, layers)[0]


def nested(params, x):
    def group(x, layers):
        return through(layers, x), None

    return lax.scan(group, x, params["layers"])[0]


def checkpointed(params, x):
    group = jax.checkpoint(lambda x, layers: (through(layers, x), None))
    return lax.scan(group, x, params["layers"])[0]


def regrouped(params, x):
    """As a fold with nested checkpoints does."""
    shape = GROUPS, LAYERS
    layers = jax.tree.map(lambda w: w.reshape(*shape, *w.shape[1:]), params["layers"])
    return checkpointed({"layers": layers}, x)


def halves(params, x):
    first, second = (
        jax.tree.map(lambda w, part=part: w[part], params["layers"])
        for part in (slice(LAYERS), slice(LAYERS, None))
    )
    return through(second, jnp.tanh(through(first, x)))


def with_own(params, x):
    def group(x, given):
        own, layers = given
        return through(layers, UNIT(own, x)), None

    return lax.scan(group, x, (params["own"], params["layers"]))[0]


def with_own_checkpointed(params, x):
    """The group's own layer behind the loop, and all of it computed again."""

    @jax.checkpoint
    def group(x, given):
        own, layers = given
        return UNIT(own, jnp.tanh(through(layers, x))), None

    return lax.scan(group, x, (params["own"], params["layers"]))[0]


def twice(params, x):
    """Each layer runs in a loop of its own, which adds up its gradients."""

    def run(x, w):
        return lax.fori_loop(0, 2, lambda _, x: UNIT(w, x), x), None

    return lax.scan(run, x, params["layers"])[0]


def asked(params, x, **options):
    """Scans that are told what to gather ahead, in a loop over the whole stack."""

    def layer(w, x, static=1):
        return UNIT(w, x) * static, None

    def again(x, _):
        return fsdp.scan(layer, params["layers"], x, **options)[0], None

    return lax.scan(again, x, length=2)[0]


class LinenLayer(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(self.width)(nn.relu(nn.Dense(2 * self.width)(x)))


def linen_scan(width):
    layer = functools.partial(LinenLayer, width)
    return nn.remat_scan(layer, lengths=(GROUPS, LAYERS))()


TWICE = [fsdp.Stacked("layers", num_dims=2)]
FORMS = {
    "nested": (make_stack, TWICE, nested),
    "checkpointed": (make_stack, TWICE, checkpointed),
    "regrouped": (make_one_dim, [fsdp.Stacked("layers")], regrouped),
    "halves": (make_one_dim, [fsdp.Stacked("layers")], halves),
    "each layer twice": (make_one_dim, [fsdp.Stacked("layers")], twice),
    "with its own": (make_groups, [*TWICE, fsdp.Stacked("own")], with_own),
    "with its own, checkpointed": (
        make_groups,
        [*TWICE, fsdp.Stacked("own")],
        with_own_checkpointed,
    ),
    "fsdp.scan(prefetch=1)": (
        make_one_dim,
        [fsdp.Stacked("layers")],
        functools.partial(asked, prefetch=1),
    ),
    "fsdp.scan(static=...)": (
        make_one_dim,
        [fsdp.Stacked("layers")],
        functools.partial(asked, static=[1, 1, 1, 2, 2, 2]),
    ),
    "nn.remat_scan": (
        lambda key, width=WIDTH: linen_scan(width).init(key, jnp.zeros((1, width))),
        [fsdp.Stacked("params.*", num_dims=2)],
        lambda params, x: linen_scan(x.shape[-1]).apply(params, x),
    ),
}


def planned(form, width, devices=None, **config):
    make, units, run = FORMS[form]
    make = functools.partial(make, width=width)
    mesh = fsdp.make_mesh(devices=devices)
    plan = fsdp.fully_shard(make, mesh, units, fsdp.FSDPConfig(**config))
    return plan, lambda params, batch: (run(params, batch) ** 2).mean()


@pytest.mark.each_case  # each form has loops of its own
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prefetch", [1, 2])
def test_nested_loops_have_the_gradients_of_one_device(form, prefetch, caplog):
    plan, loss = planned(form, WIDTH, prefetch=prefetch)
    rows = jnp.sin(jnp.arange(16.0 * WIDTH)).reshape(16, WIDTH)
    audited = fsdp.audit.audit_loss(plan, loss, rows)
    assert max(audited.grad_differences.values()) < 2e-6  # the order of sums
    assert not caplog.records  # all gather ahead


def test_a_layer_that_a_loop_and_the_loop_around_it_run_is_said_to_wait(caplog):
    mesh = fsdp.make_mesh()
    plan = fsdp.fully_shard(make_stack, mesh, TWICE, fsdp.FSDPConfig(prefetch=1))

    def group(x, layers):
        first = jax.tree.map(lambda w: w[0], layers)
        return through(layers, UNIT(first, x)), None

    def loss(params, x):
        return (lax.scan(group, x, params["layers"])[0] ** 2).mean()

    rows = jnp.sin(jnp.arange(16.0 * WIDTH)).reshape(16, WIDTH)
    audited = fsdp.audit.audit_loss(plan, loss, rows)
    assert max(audited.grad_differences.values()) < 2e-6
    (said,) = {record.getMessage() for record in caplog.records}
    assert "'layers'" in said and "the same units" in said


@pytest.mark.each_case
@pytest.mark.parametrize("form", FORMS)
def test_nested_loops_keep_no_layer_unsharded(gpus, form):
    width = 256
    plan, loss = planned(form, width, gpus)
    rows = jax.ShapeDtypeStruct((64, width), jnp.float32, sharding=plan.batch_sharding)
    step = fsdp.make_train_step(plan, loss, TX)
    traced = step.jitted.trace(fsdp.abstract_state(plan, TX), rows)
    fsdp.audit_step(plan, traced.lower().compile())
    # Per device: the state of all parameters is split.
    compiled = traced.lower().compile().as_text()
    assert not re.findall(r"f32\[\d+,(?:\d+,)?(?:256,512|512,256)\]", compiled)
