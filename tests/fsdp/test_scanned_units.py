"""Units that a scan of any framework runs: gathered one iteration ahead."""

from __future__ import annotations

import logging
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.blocks import WIDTH, EqxBlock, NnxBlock
from helpers.errors import facts
from helpers.operations import operations
from helpers.two_steps import two_steps
from jax.extend import core

import fsdp_jax as fsdp
from fsdp_jax import _scopes as scopes
from fsdp_jax.step._lifted_gathers import without_dead

UNITS = 4
TX = optax.sgd(1e-2)
BATCH = jnp.sin(jnp.arange(8.0 * WIDTH)).reshape(8, WIDTH)


class NnxModel(nnx.Module):
    def __init__(self, rngs, wrap=lambda run: run):
        make = nnx.vmap(lambda rngs: NnxBlock(rngs), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=UNITS)(make)(rngs)
        self.wrap = wrap

    def __call__(self, x):
        def run(x, layer):
            return layer(x)

        axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
        return nnx.scan(self.wrap(run), **axes)(x, self.layers)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(16)(x))), None


class LinenModel(nn.Module):
    block: type = LinenBlock

    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        layers = nn.scan(self.block, length=UNITS, **axes)(name="layers")
        return layers(x, None)[0]


class EqxModel(eqx.Module):
    """A stack as haliax folds over it: it slices the block's arrays, and recomputes."""

    layers: EqxBlock

    def __init__(self, key):
        self.layers = eqx.filter_vmap(EqxBlock)(jax.random.split(key, UNITS))

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        @jax.checkpoint
        def run(x, arrays):
            return eqx.combine(arrays, static)(x), None

        return jax.lax.scan(run, x, arrays)[0]


def make_weights(key):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (UNITS, WIDTH, 16)),
        "down": jax.random.normal(down, (UNITS, 16, WIDTH)) / 16,
    }


def feed_forward(weights, x):
    return x + jax.nn.relu(x @ weights["up"]) @ weights["down"]


def of_lax(model, x, wrap=lambda run: run, **options):
    """Each output of a layer is a result too, and one operand is a constant."""
    unit = fsdp.unit(feed_forward)

    def run(x, given):
        weights, number = given
        x = unit(weights, x) * jnp.cos(number) + BATCH[:1]
        return x, x.sum()

    stack = (model["layers"], jnp.arange(UNITS))
    x, sums = jax.lax.scan(wrap(run), x, stack, **options)
    return x + sums.mean()


def of_fsdp(model, x, **options):
    def run(weights, x):
        return feed_forward(weights, x), None

    return fsdp.scan(run, model["layers"], x, **options)[0]


def squared(model, batch):
    return (model(batch) ** 2).mean()


def of_linen(model):
    return lambda params, batch: (model.apply(params, batch) ** 2).mean()


def nnx_form(**options):
    return lambda key: NnxModel(nnx.Rngs(key), **options), [NnxBlock], squared


def linen_form(model):
    units = [fsdp.Stacked("params.layers")]
    return lambda key: model.init(key, BATCH), units, of_linen(model)


def tree_form(run, **options):
    def loss(model, batch):
        return (run(model, batch, **options) ** 2).mean()

    units = [fsdp.Stacked("layers")]
    return lambda key: {"layers": make_weights(key)}, units, loss


def of_a_part(model, x):
    unit = fsdp.unit(feed_forward)
    first = jax.tree.map(lambda w: w[:2], model["layers"])
    return jax.lax.scan(lambda x, weights: (unit(weights, x), None), x, first)[0]


FORMS = {
    "nnx.scan": nnx_form(),
    "nnx.scan of nnx.remat": nnx_form(wrap=nnx.remat),
    "nn.scan": linen_form(LinenModel()),
    "nn.scan of nn.remat": linen_form(LinenModel(nn.remat(LinenBlock))),
    "fold": (EqxModel, [fsdp.Stacked(EqxBlock)], squared),
    "lax.scan": tree_form(of_lax),
    "lax.scan of remat": tree_form(of_lax, wrap=jax.checkpoint, unroll=2),
    "lax.scan in remat": tree_form(jax.checkpoint(of_lax)),
    "fsdp.scan": tree_form(of_fsdp),
    "a part of the stack": tree_form(of_a_part),
}


def planned(form, **options):
    make_model, units, loss = form
    config = fsdp.FSDPConfig(**options)
    plan = fsdp.fully_shard(make_model, fsdp.make_mesh(), units=units, config=config)
    return plan, loss


def trained(name, **options):
    plan, loss = planned(FORMS[name], **options)
    return two_steps(plan, loss, TX, BATCH)


@pytest.mark.usefixtures("fusion_emitters")
@pytest.mark.parametrize("name", FORMS)
def test_gathering_ahead_changes_no_bit_and_compiles_once(name):
    left, ahead = trained(name, prefetch=0), trained(name, prefetch=1)
    jax.tree.map(np.testing.assert_array_equal, left, ahead)


def arithmetic(name, **options):
    plan, loss = planned(FORMS[name], **options)
    step = fsdp.make_train_step(plan, loss, TX)
    trace = step.jitted.trace(fsdp.abstract_state(plan, TX), BATCH).jaxpr
    return operations(trace.jaxpr, ("dot_general", "cos", "sin"))


@pytest.mark.parametrize("name", FORMS)
def test_gathering_ahead_changes_no_product(name):
    """XLA:CPU may fuse the same operations otherwise, and round the last bit so."""
    assert arithmetic(name, prefetch=0) == arithmetic(name, prefetch=1)


def test_a_product_that_is_computed_twice_is_counted_twice():
    plain, remat = map(arithmetic, ("nn.scan", "nn.scan of nn.remat"))
    # Backward reads the result of a unit's first product, and not of its second.
    assert sum(remat.values()) - sum(plain.values()) == UNITS


def programs(eqn):
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if isinstance(one, core.Jaxpr):
                yield one


def gathers(jaxpr, path="", loops=0):
    """Scopes of the gathers of units in a trace, with the number of loops around."""
    # A reduction is a derivative, which traces a gather too, that nobody reads.
    for eqn in without_dead(jaxpr.eqns, jaxpr.outvars):
        here = f"{path}/{eqn.source_info.name_stack}"
        if eqn.primitive.name == "all_gather" and scopes.unit_of(here) != "root":
            yield here, loops
        for inner in programs(eqn):
            yield from gathers(inner, here, loops + (eqn.primitive.name == "scan"))


def in_loops(form, **options):
    """Scopes of the gathers that loops of a training step run."""
    plan, loss = planned(form, **options)
    step = fsdp.make_train_step(plan, loss, TX)
    trace = step.jitted.trace(fsdp.abstract_state(plan, TX), BATCH).jaxpr
    return [path for path, loops in gathers(trace.jaxpr) if loops]


@pytest.mark.parametrize("name", FORMS)
def test_what_a_loop_gathers_is_for_a_later_iteration(name):
    found = in_loops(FORMS[name])
    assert len(found) >= 4  # Two weights or more, forward and backward.
    assert all(scopes.is_in(path, scopes.PREFETCH) for path in found)


def test_without_prefetch_a_loop_gathers_for_its_own_iteration():
    found = in_loops(FORMS["lax.scan"], prefetch=0)
    assert found
    assert not any(scopes.is_in(path, scopes.PREFETCH) for path in found)


def test_a_scan_that_asks_for_none_is_left_as_it_is():
    found = in_loops(tree_form(of_fsdp, prefetch=0))
    assert not any(scopes.is_in(path, scopes.PREFETCH) for path in found)


def test_one_device_has_nothing_to_gather_ahead():
    mesh = fsdp.make_mesh(devices=jax.devices()[:1])
    make_model, units, _ = FORMS["lax.scan"]
    assert fsdp.fully_shard(make_model, mesh, units=units).prefetch == 0


def in_a_branch(model, x):
    unit = fsdp.unit(feed_forward)

    def run(x, weights):
        return jax.lax.cond(True, unit, lambda _, x: x, weights, x), None

    return jax.lax.scan(run, x, model["layers"])[0]


def by_index(model, x):
    unit = fsdp.unit(feed_forward)

    def run(x, i):
        return unit(jax.tree.map(lambda w: w[i], model["layers"]), x), None

    return jax.lax.scan(run, x, jnp.arange(UNITS))[0]


def printing(run):
    def printed(x, given):
        jax.debug.print("{}", x[0, 0])
        return run(x, given)

    return printed


LEFT = {
    "effects": (tree_form(of_lax, wrap=printing), {}, "jax.debug.print"),
    "reversed": (tree_form(of_lax, reverse=True), {}, "reverse=True"),
    "weights kept": (
        FORMS["lax.scan"],
        {"reshard_after_forward": False},
        "reshard_after_forward=False",
    ),
    "a branch": (tree_form(in_a_branch), {}, "'cond'"),
    "by an index": (tree_form(by_index), {}, "xs"),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_loop_that_cannot_gather_ahead_is_left_and_says_why(name, caplog):
    form, options, reason = LEFT[name]
    with caplog.at_level(logging.WARNING, "fsdp_jax"):
        found = in_loops(form, **options)
    assert not any(scopes.is_in(path, scopes.PREFETCH) for path in found)
    (said,) = {record.getMessage() for record in caplog.records}
    assert re.search(facts("'layers'", reason), said)


@pytest.mark.parametrize(
    "options, reason",
    [({"prefetch": 0}, "prefetch=0"), ({"reshard_after_forward": False}, "4.00 KiB")],
    ids=str,
)
def test_a_plan_says_what_it_costs_not_to_gather_ahead(options, reason):
    usual, _ = planned(FORMS["lax.scan"])
    plan, _ = planned(FORMS["lax.scan"], **options)
    (line,) = set(repr(plan).splitlines()) - set(repr(usual).splitlines())
    # Two weights of 8 x 16 in float32, in each of four layers.
    assert re.search(facts("4.00 KiB", reason), line)
