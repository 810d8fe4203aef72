"""One copy of a token goes to each node, with the results of direct dispatch."""

from __future__ import annotations

import functools
import json
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
def gradients(
    ranks_per_node=None, nodes_per_token=None, factor=1.25, dispatch_dtype=None
):
    """Function to the output, the dropped choices, and gradients of everything."""
    dispatch = mapped(
        functools.partial(
            DIRECT,
            capacity_factor=factor,
            ranks_per_node=ranks_per_node,
            nodes_per_token=nodes_per_token,
            dispatch_dtype=dispatch_dtype,
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


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_tokens_in_float8_are_rounded_as_by_direct_dispatch(ranks_per_node):
    batch, dtype = tokens(), jnp.float8_e4m3fn
    got, (y, _) = gradients(ranks_per_node, dispatch_dtype=dtype)(*batch)
    expected, (expected_y, _) = gradients(dispatch_dtype=dtype)(*batch)
    assert difference((got, y), (expected, expected_y)) < SAME
    whole, (whole_y, _) = gradients(ranks_per_node)(*batch)
    assert all(
        difference(*pair) > 0.01
        for pair in zip((got, y), (whole, whole_y), strict=True)
    )


def test_weights_of_other_choices_would_be_noticed():
    x, experts, chosen_weights = tokens()
    _, (y, _) = gradients(4)(x, experts, chosen_weights)
    _, (other, _) = gradients(4)(x, experts, chosen_weights[:, ::-1].copy())
    assert difference(y, other) > 1


@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data(), ranks_per_node=st.sampled_from([2, 4]))
def test_any_choices_have_the_results_of_direct_dispatch(data, ranks_per_node):
    x, _, chosen_weights = tokens()
    # Few distinct experts: repeated tokens on a node, full experts, empty nodes.
    some = st.lists(
        st.integers(0, EXPERTS - 1), min_size=CHOSEN, max_size=6, unique=True
    )
    pools = data.draw(st.lists(some, min_size=1, max_size=5))
    rows = [pools[t % len(pools)] for t in range(TOKENS)]
    experts = np.array([np.roll(row, t)[:CHOSEN] for t, row in enumerate(rows)])
    got, (y, dropped) = gradients(ranks_per_node)(x, experts, chosen_weights)
    expected, (expected_y, expected_dropped) = gradients()(x, experts, chosen_weights)
    np.testing.assert_array_equal(dropped, expected_dropped)
    assert difference((got, y), (expected, expected_y)) < SAME


def on_nodes(experts, limit, per_node):
    """Which choices are on a token's first `limit` nodes, one choice at a time."""
    allowed = np.zeros(experts.shape, bool)
    for t, row in enumerate(experts // per_node):
        nodes = list(dict.fromkeys(row))[:limit]
        allowed[t] = [node in nodes for node in row]
    return allowed


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_choices_on_more_nodes_than_the_limit_are_dropped_and_counted(limit):
    x, experts, chosen_weights = tokens()
    allowed = on_nodes(experts, limit, EXPERTS // 4)
    # Room for all: only the limit drops.
    got, (y, dropped) = gradients(2, limit, 16.0)(x, experts, chosen_weights)
    np.testing.assert_array_equal(dropped, (~allowed).sum(-1))
    assert dropped.any()
    # A dropped choice counts as one of weight 0.
    without, (expected_y, none) = gradients(None, None, 16.0)(
        x, experts, chosen_weights * allowed
    )
    assert not none.any()
    assert difference((y, got[:2]), (expected_y, without[:2])) < SAME
    assert difference(got[2], without[2] * allowed) < SAME


def test_choices_beyond_the_limit_take_no_slot_of_others():
    x, _, chosen_weights = tokens()
    # Without the limit each rank's first choices of expert 0 would fill it.
    experts = np.tile([15, 11, 0, 1], (TOKENS, 1))
    experts[1::2] = [0, 1, 2, 3]
    _, (_, dropped) = gradients(2, 1, 2.0)(x, experts, chosen_weights)
    # Expert 0 has 3 slots of each rank, for its 3 tokens that may use it.
    np.testing.assert_array_equal(dropped[1::2], 0)
    np.testing.assert_array_equal(dropped[::2], 3)


def collectives(ranks_per_node, nodes_per_token):
    """Opcode, replica groups and rows of the collectives of tokens, both directions."""
    dispatch = mapped(
        functools.partial(
            DIRECT, ranks_per_node=ranks_per_node, nodes_per_token=nodes_per_token
        )
    )

    def loss(w, x, chosen_weights, experts):
        return jnp.sin(dispatch(w, x, experts, chosen_weights)[0]).sum()

    x, experts, chosen_weights = tokens()
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(
        weights(), x, chosen_weights, experts
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    pattern = (
        r'(ragged_all_to_all|"stablehlo\.all_to_all").*?replica_groups = '
        r"(?:dense<(.*?)>|#stablehlo\.replica_group_mesh_axes<.*?>\]>)"
        rf".*?: \(tensor<(\d+)x{EMBED}xf64>"
    )
    # Newer jax names a group of all ranks of an axis by the axis; there is one axis.
    everyone = json.dumps([list(range(RANKS))])
    return [
        (
            op.strip('"').removeprefix("stablehlo."),
            json.loads(ranks or everyone),
            int(rows),
        )
        for op, ranks, rows in re.findall(pattern, text)
    ]


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_tokens_cross_nodes_once_a_node_and_are_copied_within(ranks_per_node):
    nodes, limit = RANKS // ranks_per_node, RANKS // ranks_per_node - 1
    found = collectives(ranks_per_node, limit)
    # There and back, forward and backward, in both stages.
    assert [op for op, _, _ in found].count("ragged_all_to_all") == 4
    assert [op for op, _, _ in found].count("all_to_all") == 4
    mine = TOKENS // RANKS
    for op, groups, rows in found:
        within = [len({rank // ranks_per_node for rank in g}) == 1 for g in groups]
        if op == "all_to_all":
            assert all(within)
        else:
            assert not any(within)
            assert all(len(group) == nodes for group in groups)
            assert rows in {mine * limit, mine * nodes}


def program_for_gpus(dispatch) -> str:
    """StableHLO of a dispatch alone, without its gradient."""
    x, experts, chosen_weights = tokens()
    traced = jax.jit(mapped(dispatch)).trace(weights(), x, experts, chosen_weights)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_parts_of_a_batch_do_not_wait_for_the_counts_of_each_other():
    # XLA merges all-reduces and all-gathers that do not depend on each other.
    by_node = functools.partial(DIRECT, ranks_per_node=2, nodes_per_token=2)
    program = program_for_gpus(by_node)
    assert "stablehlo.all_reduce" not in program
    assert "stablehlo.all_gather" not in program
    # The dispatch without a capacity sums its counts over all ranks.
    assert "stablehlo.all_reduce" in program_for_gpus(ops.expert_parallel_dispatch)


def test_without_nodes_tokens_cross_them_for_each_expert():
    assert {(op, len(groups)) for op, groups, _ in collectives(None, None)} == {
        ("all_to_all", 1)
    }


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ranks_per_node": 3}, ("ranks_per_node=3", "8 ranks", "'ep'")),
        ({"ranks_per_node": 0}, ("ranks_per_node=0", "1")),
        ({"nodes_per_token": 2}, ("nodes_per_token=2", "ranks_per_node")),
        (
            {"ranks_per_node": -1, "nodes_per_token": 0},
            ("ranks_per_node=-1", "nodes_per_token=0"),
        ),
    ],
)
def test_nodes_that_cannot_be_are_refused(options, named):
    with pytest.raises(ValueError, match=facts(*named)):
        jax.eval_shape(
            mapped(functools.partial(DIRECT, **options)),
            weights(),
            *(tokens()[at] for at in (0, 1, 2)),
        )


def test_ranks_of_one_node_send_tokens_directly():
    x, experts, chosen_weights = tokens()
    got, (y, dropped) = gradients(8)(x, experts, chosen_weights)
    expected = gradients()(x, experts, chosen_weights)
    assert difference((got, (y, dropped)), expected) == 0
