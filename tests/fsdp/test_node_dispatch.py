"""One copy of a token goes to each node, with the results of direct dispatch."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.errors import facts
from helpers.experts import EMBED, WIDTH, run_experts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax import ops

RANKS, EXPERTS, CHOSEN, TOKENS = 8, 16, 4, 48  # tokens of all ranks
DIRECT = functools.partial(ops.expert_capacity_dispatch, capacity_factor=1.25)


def weights():
    normal = np.random.default_rng(1).normal
    return {
        "up": normal(size=(EXPERTS, EMBED, WIDTH)),
        "gain": normal(size=(EXPERTS, 3)),
        "bias": normal(size=(EXPERTS, WIDTH)),
        "down": normal(size=(EXPERTS, WIDTH, EMBED)),
    }


ROUTINGS = {
    "even": lambda scores: scores,
    # Nearly all first choices are expert 5: many are dropped.
    "to one expert": lambda scores: scores + 9 * (np.arange(EXPERTS) == 5),
    # None of the last half: with 2 or 4 nodes, at least one gets no token.
    "none to a node": lambda scores: scores - 9 * (np.arange(EXPERTS) >= EXPERTS // 2),
}


def tokens(routing="even", seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(TOKENS, EMBED))
    scores = ROUTINGS[routing](random.random((TOKENS, EXPERTS)))
    experts = np.argsort(-scores, axis=-1)[:, :CHOSEN]
    return x, experts, random.random((TOKENS, CHOSEN))


def mapped(dispatch):
    """`fn(weights, x, experts, chosen weights)` on global arrays, over all ranks."""

    def local(w, x, experts, chosen_weights):
        run = functools.partial(run_experts, w)
        return dispatch(run, x, experts, chosen_weights, EXPERTS)

    mesh = fsdp.make_mesh(ep=RANKS)
    return jax.shard_map(
        local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
    )


@functools.lru_cache
def gradients(ranks_per_node=None, nodes_per_token=None, factor=1.25):
    """Function to the output, the dropped choices, and gradients of everything."""
    dispatch = mapped(
        functools.partial(
            DIRECT,
            capacity_factor=factor,
            ranks_per_node=ranks_per_node,
            nodes_per_token=nodes_per_token,
        )
    )

    def loss(w, x, chosen_weights, experts):
        y, dropped = dispatch(w, x, experts, chosen_weights)
        return jnp.sin(y).sum(), (y, dropped)

    fn = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))

    def run(x, experts, chosen_weights):
        return jax.tree.map(np.asarray, fn(weights(), x, chosen_weights, experts))

    return run


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def difference(a, b):
    """The largest difference of any element."""
    return max(
        np.abs(one - other).max()
        for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# Sums of four float64 numbers below 1e3 in another order: some 1e-13 each.
SAME = 1e-10


@pytest.mark.parametrize("ranks_per_node", [2, 4])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_outputs_and_gradients_are_those_of_direct_dispatch(routing, ranks_per_node):
    batch = tokens(routing)
    got, (y, dropped) = gradients(ranks_per_node)(*batch)
    expected, (expected_y, expected_dropped) = gradients()(*batch)
    np.testing.assert_array_equal(dropped, expected_dropped)
    assert difference((got, y), (expected, expected_y)) < SAME
    assert dropped.any()
    assert all(np.abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(got))
