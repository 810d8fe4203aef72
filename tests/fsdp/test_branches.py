"""Units in the branches of a `cond` or `switch` in a loop over layers.

jax saves what each branch needs for backward in the same arrays where shapes are equal:
there one operand of backward is the shard of whichever unit ran.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers.blocks import UNIT, WIDTH, make_list
from helpers.errors import facts
from jax import lax

import fsdp_jax as fsdp

ROWS = jnp.sin(jnp.arange(16.0 * WIDTH)).reshape(16, WIDTH)
KINDS = jnp.array([0, 1, 1, 0])


def make_kinds(key):
    """Stacks of two kinds of layers, one of which runs at each depth."""
    layers = make_list(key, units=2 * len(KINDS))["layers"]
    stacks = [layers[: len(KINDS)], layers[len(KINDS) :]]
    names = ("first", "second")
    of = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *part) for part in stacks]
    return dict(zip(names, of, strict=True))


def one_of_two(params, x):
    runs = [functools.partial(UNIT, w) for w in params["layers"][:2]]
    return lax.scan(lambda x, i: (lax.cond(i == 0, *runs, x), None), x, KINDS)[0]


def one_of_all(params, x):
    runs = [functools.partial(UNIT, w) for w in params["layers"]]
    return lax.scan(lambda x, i: (lax.switch(i, runs, x), None), x, jnp.arange(4))[0]


def one_or_none(params, x):
    run = functools.partial(UNIT, params["layers"][0])
    return lax.scan(lambda x, i: (lax.cond(i, run, jnp.tanh, x), None), x, KINDS > 0)[0]


def of_two_stacks(params, x):
    def body(x, given):
        kind, first, second = given
        runs = [functools.partial(UNIT, w) for w in (first, second)]
        return lax.switch(kind, runs, x), None

    return lax.scan(body, x, (KINDS, params["first"], params["second"]))[0]


LIST = (make_list, ["layers.*"])
FORMS = {
    "one of two": (*LIST, one_of_two),
    "one of all": (*LIST, one_of_all),
    "one or none": (*LIST, one_or_none),
    "of two stacks": (
        make_kinds,
        [fsdp.Stacked("first"), fsdp.Stacked("second")],
        of_two_stacks,
    ),
}


@pytest.mark.each_case  # each form saves its shards for backward in another way
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_units_in_branches_have_the_gradients_of_one_device(form, prefetch, caplog):
    make_model, units, run = FORMS[form]
    config = fsdp.FSDPConfig(prefetch=prefetch)
    plan = fsdp.fully_shard(make_model, fsdp.make_mesh(), units, config)
    audited = fsdp.audit.audit_loss(plan, lambda m, b: (run(m, b) ** 2).mean(), ROWS)
    assert max(audited.grad_differences.values()) < 1e-6  # the order of sums
    # A unit that may not run cannot be gathered ahead, which is said once.
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == prefetch and all(
        "branch" in one or "cond" in one for one in said
    )


def test_a_loss_that_chooses_among_the_arrays_of_shards_is_refused():
    plan = fsdp.fully_shard(make_list, fsdp.make_mesh(), ["layers.*"])

    def loss(params, batch):
        first, second = (jax.tree.leaves(params["layers"][i])[0] for i in range(2))
        chosen = lax.cond(KINDS[0] == 0, lambda: first, lambda: second)
        return (batch**2).mean() + chosen.sum()

    params = fsdp.init_params(plan, jax.random.key(0))
    with pytest.raises(ValueError, match=facts("layers.0.down", "layers.1.down")):
        fsdp.value_and_grad(plan, loss)(params, ROWS)
