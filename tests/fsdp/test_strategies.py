"""Every strategy computes what one device computes, with the collectives it names.

A grid: strategies x microbatches x even and odd shapes x precisions. Pytest runs a part
that covers each value of each, and each strategy once with a loop over microbatches;
`make test-long` runs all of it.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host, worst
from helpers.errors import facts
from helpers.hlo import collectives, group_size, loops_around_loops
from helpers.zoo import CASES, batch

import fsdp_jax as fsdp
from fsdp_jax.sharding._plan import ROOT

# name -> (zero_dp_strategy, outer_dp_sharding_strategy, devices on dp_outer)
STRATEGIES = {
    "DDP": (0, 0, 1),
    "ZeRO-1": (1, 0, 1),
    "ZeRO-2": (2, 0, 1),
    "ZeRO-3": (3, 0, 1),
    "DDP x 2": (0, 0, 2),
    "ZeRO-1 x 2": (1, 0, 2),
    "ZeRO-2 x 2": (2, 0, 2),
    "HSDP": (3, 0, 2),
    "HFSDP": (3, 1, 2),
}
LAYERS, ROWS = 3, 24
# width of the stream, of the layers within, of the output
SIZES = {"even": (16, 32, 8), "odd": (13, 17, 101)}
# policy, what parameters may differ by as ||a - b|| / ||b||. float64 stands for all
# precisions of one dtype: float32 would differ by rounding alone. In bfloat16 each rank
# rounds the gradient of its own rows, to 2^-9; the negative control is at 1.2.
PRECISIONS = {
    "float64": ({}, 1e-9),
    "bfloat16": ({"param_dtype": jnp.bfloat16, "main_grads_dtype": jnp.float32}, 5e-2),
}
TX = optax.adamw(1e-2, eps=1e-3)

CELLS = list(itertools.product(STRATEGIES, (1, 3), SIZES, PRECISIONS))
COVERING = {(strategy, 3, "even", "float64") for strategy in STRATEGIES} | {
    ("DDP", 1, "odd", "bfloat16"),
    ("ZeRO-1", 1, "odd", "float64"),
    ("ZeRO-2", 3, "odd", "bfloat16"),
    ("ZeRO-3", 3, "odd", "float64"),
    ("ZeRO-3", 1, "even", "bfloat16"),
    ("ZeRO-2 x 2", 1, "odd", "float64"),
    ("HSDP", 3, "odd", "bfloat16"),
    ("HFSDP", 3, "odd", "float64"),
    ("HFSDP", 1, "even", "bfloat16"),
}


def cells():
    return [
        pytest.param(
            *cell,
            marks=() if cell in COVERING else (pytest.mark.long,),
            id="-".join(map(str, cell)),
        )
        for cell in CELLS
    ]


def make_weights(sizes, dtype):
    embed, mlp, out = SIZES[sizes]

    def make(key):
        up, down, head = jax.random.split(key, 3)
        return {
            "layers": {
                "up": 0.3 * jax.random.normal(up, (LAYERS, embed, mlp), dtype),
                "down": 0.3 * jax.random.normal(down, (LAYERS, mlp, embed), dtype),
                "bias": jnp.zeros((LAYERS, mlp), dtype),
            },
            "head": 0.3 * jax.random.normal(head, (embed, out), dtype),
        }

    return make


def layer(w, x):
    return x + jnp.tanh(x @ w["up"] + w["bias"][None]) @ w["down"], None


def loss_fn(weights, batch):
    x = batch["x"].astype(weights["head"].dtype)
    x, _ = fsdp.scan(layer, weights["layers"], x)
    error = (x @ weights["head"]).astype(batch["y"].dtype) - batch["y"]
    return jnp.mean(error**2)


def rows_of(sizes, dtype):
    embed, _, out = SIZES[sizes]
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(ROWS, embed)).astype(dtype),
        "y": random.normal(size=(ROWS, out)).astype(dtype),
    }


def plan_of(strategy, sizes="even", precision="float64", mesh=None, **config):
    inner, outer, dp_outer = STRATEGIES[strategy]
    policy, _ = PRECISIONS[precision]
    return fsdp.fully_shard(
        make_weights(sizes, np.float64 if precision == "float64" else np.float32),
        mesh or fsdp.make_mesh(dp_outer=dp_outer),
        [fsdp.Stacked("layers")],
        fsdp.FSDPConfig(
            zero_dp_strategy=inner,
            outer_dp_sharding_strategy=outer,
            mp_policy=fsdp.MixedPrecisionPolicy(**policy),
            # What is counted here is easier to say of loops that gather for themselves.
            prefetch=0,
            **config,
        ),
    )


def three_steps(plan, sizes, precision, num_microbatches):
    """(state, loss, HLO) after three steps by one compiled program."""
    data = rows_of(sizes, np.float64 if precision == "float64" else np.float32)
    step = fsdp.make_train_step(plan, loss_fn, TX, num_microbatches=num_microbatches)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(1)))
    compiled = step.lower(state, data).compile()
    data = jax.device_put(data, plan.batch_sharding)
    for _ in range(3):
        state, metrics = compiled(state, data)
    return state, float(metrics["loss"]), compiled.as_text()


@functools.cache
def one_device(sizes, precision):
    """(parameters, loss) of one device."""
    with jax.enable_x64(precision == "float64"):
        mesh = fsdp.make_mesh(devices=jax.devices()[:1])
        plan = plan_of("ZeRO-3", sizes, precision, mesh)
        state, loss, _ = three_steps(plan, sizes, precision, 1)
        return host(state.params), loss


@pytest.mark.parametrize("strategy, num_microbatches, sizes, precision", cells())
def test_a_strategy_computes_what_one_device_does_in_its_bytes_and_collectives(
    strategy, num_microbatches, sizes, precision
):
    with jax.enable_x64(precision == "float64"):
        plan = plan_of(strategy, sizes, precision)
        state, loss, text = three_steps(plan, sizes, precision, num_microbatches)
        params = host(fsdp.unshard(state.params))
    want, want_loss = one_device(sizes, precision)
    tolerance = PRECISIONS[precision][1]
    assert worst(params, want) < tolerance
    assert abs(loss - want_loss) < tolerance * want_loss
    assert_bytes(strategy, plan, state)
    assert_collectives(strategy, plan, counted(text), num_microbatches)


def assert_bytes(strategy, plan, state):
    """Of parameters, gradients and Adam's two moments on each device, exactly."""
    inner, outer, dp_outer = STRATEGIES[strategy]
    pieces = (8 // dp_outer if inner else 1) * (dp_outer if outer else 1)
    elements = 0
    for param in plan.param_plans:
        # What no dim of divides is padded along that which then grows the least.
        dims = range(param.num_stacked, len(param.shape))
        grown = [-(-param.shape[d] // pieces) * pieces / param.shape[d] for d in dims]
        elements += round(np.prod(param.shape) * min(grown)) // pieces

    def held(tree):
        leaves = jax.tree.leaves(tree)
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

    itemsize = plan.param_plans[0].precision.main_params.itemsize
    assert held(state.params) == plan.bytes_per_device["params"] == itemsize * elements
    assert plan.bytes_per_device["grads"] == itemsize * elements
    assert held(state.opt_state) == 2 * itemsize * elements + 4  # Adam's step counter


def counted(text):
    """{(op, devices, where): operands}, where `where` is one of

    - "microbatches": anywhere in the loop over microbatches,
    - "layers": in a loop over layers outside of that, the last microbatch's,
    - "once": in no loop.
    """
    over_microbatches = loops_around_loops(text)
    counts: dict[tuple[str, int, str], int] = {}
    for c in collectives(text):
        if c.op == "all-reduce" and c.size == 1:  # The loss, and the gradient's norm.
            continue
        looped = over_microbatches & set(c.loops)
        where = "microbatches" if looped else "layers" if c.loops else "once"
        key = (c.op, group_size(c.groups), where)
        counts[key] = counts.get(key, 0) + 1
    return counts


def assert_collectives(strategy, plan, found, num_microbatches):
    inner, outer, dp_outer = STRATEGIES[strategy]
    shards, n = 8 // dp_outer, len(plan.param_plans)
    root = sum(param.unit == ROOT for param in plan.param_plans)
    late: list[tuple[str, int]] = []  # Reduced once a step, in the last backward.
    expected = {}
    if inner == 0:
        late.append(("all-reduce", 8))
    if inner in (1, 2):  # Gathered when the step begins, once.
        expected[("all-gather", shards, "once")] = n
    if inner == 1:
        late.append(("reduce-scatter", shards))
    if inner >= 1 and dp_outer > 1:
        late.append(("reduce-scatter" if outer else "all-reduce", 2))
    if outer:
        expected[("all-gather", 2, "once")] = n
    for op, devices in late:
        expected[(op, devices, "layers")] = n - root
        expected[(op, devices, "once")] = root
    if inner >= 2:  # Reduced to shards each microbatch.
        if num_microbatches > 1:
            expected[("reduce-scatter", shards, "microbatches")] = n
        if num_microbatches == 1 or late:
            expected[("reduce-scatter", shards, "layers")] = n - root
            expected[("reduce-scatter", shards, "once")] = root
    gathers = {
        where: found.pop(("all-gather", shards, where), 0)
        for where in (("microbatches", "layers", "once") if inner == 3 else ())
    }
    assert found == expected
    # Forward and backward; what no gradient needs is not gathered again, and what
    # belongs to no unit may be gathered before the loop.
    if inner == 3:
        in_loop = gathers["microbatches"] if num_microbatches > 1 else gathers["layers"]
        assert n - root < in_loop <= 2 * n
        assert gathers["once"] <= 2 * root
        if num_microbatches > 1 and not late:
            assert not gathers["layers"]


def test_a_wrong_gradient_would_be_noticed_in_bfloat16():
    # The negative control of the widest tolerance: what one rank's rows alone give.
    _, tolerance = PRECISIONS["bfloat16"]
    mesh = fsdp.make_mesh(devices=jax.devices()[:1])
    plan = plan_of("ZeRO-3", "even", "bfloat16", mesh)
    step = fsdp.make_train_step(plan, loss_fn, TX)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(1)))
    few = {name: rows[:3] for name, rows in rows_of("even", np.float32).items()}
    for _ in range(3):
        state, _ = step(state, few)
    want, _ = one_device("even", "bfloat16")
    assert worst(host(state.params), want) > 2 * tolerance


@pytest.mark.parametrize("strategy", ["DDP", "ZeRO-1", "HSDP", "HFSDP"])
def test_without_overlap_one_loop_has_all_microbatches_and_reductions_follow(strategy):
    with jax.enable_x64(True):
        plan = plan_of(strategy, overlap_outer=False)
        state, _, text = three_steps(plan, "even", "float64", 3)
        assert worst(host(state.params), one_device("even", "float64")[0]) < 1e-9
    inner, outer, dp_outer = STRATEGIES[strategy]
    found, n = counted(text), len(plan.param_plans)
    assert not any(where == "layers" for _, _, where in found)
    late = {
        (op, devices): count
        for (op, devices, where), count in found.items()
        if where == "once" and op != "all-gather"
    }
    expected = {}
    if inner == 0:
        expected[("all-reduce", 8)] = n
    if inner == 1:
        expected[("reduce-scatter", 8)] = n
    if dp_outer > 1:
        expected[("reduce-scatter" if outer else "all-reduce", 2)] = n
    assert late == expected


def test_units_are_gathered_within_the_microbatch_also_when_unrolled():
    case = CASES["nnx unrolled"]
    plan = case.plan(fsdp.make_mesh())
    tx = optax.adamw(1e-3)
    step = fsdp.make_train_step(plan, case.loss, tx, num_microbatches=3)
    lowered = step.lower(fsdp.abstract_state(plan, tx), batch(rows=24))
    found = collectives(lowered.compile().as_text())
    before = [c for c in found if c.op == "all-gather" and c.depth == 0]
    root = [param for param in plan.param_plans if param.unit == ROOT]
    assert len(before) <= len(root)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"zero_dp_strategy": 4}, ["zero_dp_strategy=4", "'optim_grads_params'"]),
        ({"zero_dp_strategy": "zero3"}, ["'zero3'", "3", "'optim_grads_params'"]),
        (
            {"outer_dp_sharding_strategy": 2},
            ["outer_dp_sharding_strategy=2", "'optim'"],
        ),
        (
            {"zero_dp_strategy": 2, "outer_dp_sharding_strategy": 1},
            [
                "outer_dp_sharding_strategy='optim'",
                "zero_dp_strategy='optim_grads'",
                "3",
            ],
        ),
        (
            {"zero_dp_strategy": 2, "placements": fsdp.Placements((), (), ())},
            ["placements=...", "zero_dp_strategy='optim_grads'"],
        ),
    ],
)
def test_strategies_that_do_not_exist_are_refused(config, message):
    with pytest.raises(ValueError, match=facts(*message)):
        fsdp.FSDPConfig(**config)


# Placements of one's own.


def placed_plan(parameter, gradient, optimizer, **sizes):
    placements = fsdp.Placements(parameter, gradient, optimizer)
    return fsdp.fully_shard(
        make_weights("even", np.float64),
        fsdp.make_mesh(**sizes),
        [fsdp.Stacked("layers")],
        fsdp.FSDPConfig(placements=placements),
    )


BOTH = ("dp_shard", "dp_outer")


@pytest.mark.parametrize(
    "placements",
    [
        (BOTH, BOTH, BOTH),  # one flat ZeRO-3 over two axes
        (("dp_shard",), BOTH, BOTH),
        ((), ("dp_shard",), BOTH),
        (("dp_shard",), (), ("dp_shard",)),  # whole gradients of split weights
        (("dp_outer",), ("dp_outer",), ("dp_outer", "dp_shard")),
    ],
    ids=str,
)
def test_any_placements_compute_the_same(placements):
    with jax.enable_x64(True):
        plan = placed_plan(*placements, dp_outer=2)
        state, _, _ = three_steps(plan, "even", "float64", 3)
        for leaf, param in zip(
            jax.tree.leaves(state.params), plan.param_plans, strict=True
        ):
            assert leaf.sharding.spec[param.split.dim] == (
                placements[2] if len(placements[2]) > 1 else placements[2][0]
            )
    want, _ = one_device("even", "float64")
    assert worst(host(state.params), want) < 1e-9


@pytest.mark.parametrize(
    "placements, message",
    [
        ((("tp",), ("tp",), ("tp",)), ["tp", "dp_outer, dp_shard, ep, cp"]),
        ((("data",), (), ()), ["data", "dp_outer, dp_shard, ep, cp"]),
        (
            (("dp_outer",), (), BOTH),
            ["parameter=('dp_outer',)", "optimizer=('dp_shard', 'dp_outer')"],
        ),
        (((), (), ("dp_shard", "dp_shard")), ["optimizer=('dp_shard', 'dp_shard')"]),
    ],
)
def test_placements_that_cannot_be_are_refused(placements, message):
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=facts("Placements", *message)),
    ):
        placed_plan(*placements, dp_outer=2)
