"""Units that a model runs one after the other: gathers go one ahead, in their order."""

from __future__ import annotations

import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.blocks import WIDTH, EqxBlock, NnxBlock, through_modules
from helpers.errors import facts
from helpers.operations import operations
from helpers.two_steps import two_steps
from jax.extend import core

import fsdp_jax as fsdp

UNITS = 4
TX = optax.adam(1e-2)
ARITHMETIC = (
    *("add", "add_any", "sub", "mul", "div", "max", "pow", "integer_pow", "sqrt"),
    *("dot_general", "reduce_sum", "reduce_scatter", "psum", "reduce_precision"),
)
BATCH = jnp.sin(jnp.arange(16.0 * WIDTH)).reshape(16, WIDTH)


class NnxModel(nnx.Module):
    def __init__(self, rngs, call=lambda layer, x: layer(x)):
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(UNITS)])
        self.call = call

    def __call__(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(16)(x)))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(UNITS):
            x = LinenBlock()(x)
        return x


class EqxModel(eqx.Module):
    layers: list

    def __init__(self, key):
        self.layers = [EqxBlock(k) for k in jax.random.split(key, UNITS)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def squared(model, batch):
    return (model(batch) ** 2).mean()


def of_linen(params, batch):
    return (LinenModel().apply(params, batch) ** 2).mean()


CHECKPOINTED = nnx.remat(lambda layer, x: layer(x))

FORMS = {
    "nnx": (lambda key: NnxModel(nnx.Rngs(key)), [NnxBlock], squared),
    "nnx, checkpointed by the model": (
        lambda key: NnxModel(nnx.Rngs(key), call=CHECKPOINTED),
        [NnxBlock],
        squared,
    ),
    "linen": (
        lambda key: LinenModel().init(key, BATCH),
        ["params.LinenBlock_*"],
        of_linen,
    ),
    "equinox": (EqxModel, [EqxBlock], squared),
}


def planned(form, **options):
    make_model, units, loss = (FORMS | IN_NO_CHAIN)[form]
    config = fsdp.FSDPConfig(**options)
    plan = fsdp.fully_shard(make_model, fsdp.make_mesh(), units=units, config=config)
    return plan, loss


def trained(form, **options):
    plan, loss = planned(form, **options)
    return two_steps(plan, loss, TX, BATCH, num_microbatches=2)


@pytest.mark.usefixtures("fusion_emitters")
@pytest.mark.parametrize("form", FORMS)
def test_the_order_changes_no_bit_and_compiles_once(form):
    left, ordered = trained(form, prefetch=0), trained(form, prefetch=1)
    jax.tree.map(np.testing.assert_array_equal, left, ordered)


def arithmetic(form, **options):
    plan, loss = planned(form, **options)
    step = fsdp.make_train_step(plan, loss, TX, num_microbatches=2)
    trace = step.jitted.trace(fsdp.abstract_state(plan, TX), BATCH).jaxpr
    return operations(trace.jaxpr, ARITHMETIC)


@pytest.mark.parametrize("form", FORMS)
def test_the_order_changes_no_operation(form):
    """XLA:CPU may write the same products transposed, and round the last bit so."""
    assert arithmetic(form, prefetch=0) == arithmetic(form, prefetch=1)


class Program:
    """The trace of a step or an evaluation, inside `shard_map`, calls inlined.

    Attributes:
      before: For each equation the indices of all that it depends on.
      units: For each equation the unit in whose scope it is; None for none.
      kinds: Name of each equation's primitive.
      live: Indices of the equations that results depend on.
    """

    def __init__(self, closed):
        self.before, self.units, self.kinds = [], [], []
        env = {}
        jaxpr = inside_shard_map(closed.jaxpr)
        self._walk(jaxpr, env, "")
        self.live = sorted(
            frozenset().union(*(env.get(v, ()) for v in variables(jaxpr.outvars)))
        )

    def of(self, kind):
        """Indices of a kind of equation in units, in the order of the program."""
        return [i for i in self.live if self.kinds[i] == kind and self.units[i]]

    def _walk(self, jaxpr, env, scope):
        for eqn in jaxpr.eqns:
            given = [known(env, v) for v in eqn.invars]
            name, inner = eqn.primitive.name, called(eqn)
            path = f"{scope}/{eqn.source_info.name_stack}"
            if inner is not None and name != "scan":
                own = {
                    v: env.get(w, frozenset())
                    if isinstance(w, core.Var)
                    else frozenset()
                    for v, w in zip(inner.invars, eqn.invars, strict=True)
                }
                self._walk(inner, own, path)
                for v, w in zip(eqn.outvars, inner.outvars, strict=True):
                    env[v] = (
                        own.get(w, frozenset())
                        if isinstance(w, core.Var)
                        else frozenset()
                    )
                continue
            index = len(self.kinds)
            self.kinds.append(name)
            found = re.findall(r"unit:([^/():]+)", path)
            self.units.append(found[-1] if found and found[-1] != "root" else None)
            self.before.append(frozenset().union(*given))
            for v in eqn.outvars:
                env[v] = self.before[-1] | {index}


def known(env, atom):
    return env.get(atom, frozenset()) if isinstance(atom, core.Var) else frozenset()


def variables(atoms):
    return [v for v in atoms if isinstance(v, core.Var)]


def called(eqn):
    jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return getattr(jaxpr, "jaxpr", jaxpr)


def inside_shard_map(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            return called(eqn)
        if called(eqn) is not None and (found := inside_shard_map(called(eqn))):
            return found
    return None


def step_of(form, **options):
    plan, loss = planned(form, **options)
    step = fsdp.make_train_step(plan, loss, TX)
    return Program(step.jitted.trace(fsdp.abstract_state(plan, TX), BATCH).jaxpr)


def visits(program):
    """Runs of units in order, each with its gathers; those in succession are one."""
    found = []
    for i in program.of("all_gather"):
        if not found or found[-1][0] != program.units[i]:
            found.append((program.units[i], []))
        found[-1][1].append(i)
    return found


def check_forward(program, forward):
    """A gather waits for the unit before the last, and for that unit alone."""
    products = {i: program.units[i] for i in program.of("dot_general")}
    for (first, _), (second, _), (_, gathers) in zip(
        forward, forward[1:], forward[2:], strict=False
    ):
        for gather in gathers:
            waited = {products.get(i) for i in program.before[gather]}
            assert first in waited
            assert second not in waited


@pytest.mark.parametrize("form", FORMS)
def test_gathers_go_one_unit_ahead_and_follow_each_other(form):
    program = step_of(form)
    order = visits(program)
    names = [unit for unit, _ in order]
    # Backward begins with the unit that forward ended with, whose weights are there.
    assert names == [*sorted(names[:UNITS]), *sorted(names[: UNITS - 1])[::-1]]
    check_forward(program, order[:UNITS])
    for (_, earlier), (_, later) in zip(order, order[1:], strict=False):
        assert all(set(earlier) <= program.before[gather] for gather in later)


def reductions(program):
    """Reductions by unit, in the order of the program."""
    by_unit = {}
    for i in program.of("reduce_scatter"):
        by_unit.setdefault(program.units[i], []).append(i)
    return by_unit


@pytest.mark.parametrize("form", FORMS)
def test_reductions_of_units_follow_each_other(form):
    program = step_of(form)
    groups = list(reductions(program).values())
    assert len(groups) == UNITS
    for earlier, later in zip(groups, groups[1:], strict=False):
        assert all(set(earlier) <= program.before[i] for i in later)


@pytest.mark.parametrize("form", FORMS)
def test_a_unit_waits_for_the_reduction_before_the_last(form):
    program = step_of(form)
    groups = reductions(program)
    units = list(groups)
    for first, second, third in zip(units, units[1:], units[2:], strict=False):
        products = [i for i in program.of("dot_general") if program.units[i] == third]
        waited = [program.before[i] for i in products]
        assert any(set(groups[first]) <= before for before in waited)
        assert not any(before.intersection(groups[second]) for before in waited)


def test_shards_are_cast_where_they_are_gathered():
    narrow = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    program = step_of("nnx", mp_policy=narrow)
    gathers = set(program.of("all_gather"))
    casts = program.of("convert_element_type")
    ahead = {program.units[i] for i in casts if not program.before[i] & gathers}
    assert ahead == {visits(program)[0][0]}


def test_without_prefetch_no_gather_of_forward_waits_for_a_product():
    program = step_of("nnx", prefetch=0)
    forward = program.of("all_gather")[: 2 * UNITS]
    assert not any(program.before[i] & set(program.of("dot_general")) for i in forward)


def test_more_ahead_leave_more_weights_to_backward():
    once, twice = (len(visits(step_of("nnx", prefetch=k))) for k in (1, 2))
    assert (once, twice) == (2 * UNITS - 1, 2 * UNITS - 2)


@jax.custom_vjp
def run_again(model, x):
    """The model, with a derivative rule that runs its forward pass once more."""
    return through_modules(model, x)


run_again.defvjp(
    lambda model, x: (through_modules(model, x), (model, x)),
    lambda given, grad: jax.vjp(through_modules, *given)[1](grad),
)


def test_no_more_units_are_left_to_a_second_forward_pass_than_gathered_ahead():
    make_model, units, _ = FORMS["equinox"]
    config = fsdp.FSDPConfig(prefetch=UNITS - 1)
    plan = fsdp.fully_shard(make_model, fsdp.make_mesh(), units, config)
    step = fsdp.make_train_step(plan, lambda m, x: (run_again(m, x) ** 2).mean(), TX)
    program = Program(jax.make_jaxpr(step)(fsdp.abstract_state(plan, TX), BATCH))
    # Both forward passes, and of backward the unit that is not there any more.
    assert [unit for unit, _ in visits(program)] == [
        *[f"layers.{i}" for i in range(UNITS)] * 2,
        "layers.0",
    ]


def test_evaluation_gathers_one_unit_ahead_too():
    plan, loss = planned("nnx")
    evaluate = fsdp.make_eval_step(plan, loss)
    program = Program(jax.make_jaxpr(evaluate)(plan.params, BATCH))
    assert len(visits(program)) == UNITS
    check_forward(program, visits(program))


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match=facts("prefetch", -1)):
        fsdp.FSDPConfig(prefetch=-1)


class Conditioned(nnx.Module):
    """A block of a diffusion transformer: it reads the embedding of the time first."""

    def __init__(self, rngs):
        self.scale = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.block = NnxBlock(rngs)

    def __call__(self, x, time):
        return x + self.scale(time) * self.block(x)


class DiffusionModel(nnx.Module):
    def __init__(self, rngs):
        self.time = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Conditioned(rngs) for _ in range(UNITS)])

    def __call__(self, x):
        time = self.time(x)
        for layer in self.layers:
            x = layer(x, time)
        return x


class Outer(nnx.Module):
    """A unit that enters one within it before it computes itself."""

    def __init__(self, rngs):
        self.inner = NnxBlock(rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.out(self.inner(x))


class NestedModel(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Outer(rngs) for _ in range(UNITS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class TwoTowers(nnx.Module):
    def __init__(self, rngs):
        self.text = nnx.List([NnxBlock(rngs) for _ in range(UNITS)])
        self.image = nnx.List([NnxBlock(rngs) for _ in range(UNITS)])

    def __call__(self, x):
        y = x[::-1]
        for block in self.text:
            x = block(x)
        for block in self.image:
            y = block(y)
        return x * y


def with_barriers(layer, x):
    x, scale = jax.lax.optimization_barrier((x, 2.0))
    return layer(x) * scale


IN_NO_CHAIN = {
    "a barrier around a number": (
        lambda key: NnxModel(nnx.Rngs(key), call=with_barriers),
        [NnxBlock],
        squared,
    ),
    "conditioned": (
        lambda key: DiffusionModel(nnx.Rngs(key)),
        [Conditioned],
        squared,
    ),
    "nested": (lambda key: NestedModel(nnx.Rngs(key)), [Outer, NnxBlock], squared),
    "two towers": (lambda key: TwoTowers(nnx.Rngs(key)), [NnxBlock], squared),
}


def waited_for(program, gathers):
    """Units whose products a unit's gathers wait for."""
    products = {i: program.units[i] for i in program.of("dot_general")}
    before = frozenset().union(*(program.before[gather] for gather in gathers))
    return {products[i] for i in before if i in products}


def test_a_unit_that_first_reads_an_early_array_waits_for_the_unit_before_the_last():
    program = step_of("conditioned")
    check_forward(program, visits(program)[:UNITS])


def test_a_barrier_of_the_model_may_hold_a_number():
    program = step_of("a barrier around a number")
    check_forward(program, visits(program)[:UNITS])


def test_a_unit_that_begins_with_one_within_it_is_gathered_one_block_ahead():
    program = step_of("nested")
    order = visits(program)[: 2 * UNITS]
    names = [f"layers.{i // 2}{'.inner' * (i % 2)}" for i in range(2 * UNITS)]
    assert [unit for unit, _ in order] == names
    for i, (_, gathers) in enumerate(order):
        block = i // 2
        waited = waited_for(program, gathers)
        # The outer one while the block before computes, the inner one behind its inner.
        assert (f"layers.{block - 2}" in waited) == (block > 1)
        assert (f"layers.{block - 1}.inner" in waited) == (i % 2 == 1 and block > 0)
        assert f"layers.{block - 1}" not in waited


def test_the_second_tower_waits_until_the_first_has_computed():
    program = step_of("two towers")
    order = visits(program)[: 2 * UNITS]
    last, (_, second) = f"text.{UNITS - 1}", order[UNITS + 1]
    assert order[UNITS + 1][0] == "image.1"
    assert last in waited_for(program, second)
    assert last not in waited_for(program, order[UNITS][1])


@pytest.mark.usefixtures("fusion_emitters")
def test_the_order_of_units_within_units_changes_no_bit():
    left, ordered = trained("nested", prefetch=0), trained("nested", prefetch=1)
    jax.tree.map(np.testing.assert_array_equal, left, ordered)
