"""FSDP means what it says: the compiled program does what the plan says."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import worst
from helpers.compiles import compilations
from helpers.hlo import Collective, collectives, group_size, stablehlo_dtypes
from helpers.zoo import CASES, batch

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves
from fsdp_jax.sharding._plan import ROOT

pytestmark = pytest.mark.versions

TX = optax.adamw(1e-3)


@pytest.fixture(scope="module")
def hsdp():
    """(plan, collectives) of a scanned model on two replicas of four shards.

    Without prefetch, whose programs `test_prefetch.py` looks into.
    """
    case = CASES["nnx scanned"]
    plan = case.plan(fsdp.make_mesh(dp_outer=2), prefetch=0)
    step = fsdp.make_train_step(plan, case.loss, TX, num_microbatches=3)
    lowered = step.lower(fsdp.abstract_state(plan, TX), batch(rows=48))
    return plan, collectives(lowered.compile().as_text())


def in_layers(found: list[Collective], op: str) -> dict[str, list[Collective]]:
    """Collectives over four devices in the loops over layers, by loop body.

    The loop over microbatches is a body too: it holds what belongs to no unit.
    """
    bodies: dict[str, list[Collective]] = {}
    for c in found:
        if c.op == op and c.body and c.depth == 2:
            bodies.setdefault(c.body, []).append(c)
    return bodies


def shapes(found: list[Collective]) -> Counter:
    return Counter((c.dtype, c.shape) for c in found)


def unit_params(plan):
    return [param for param in plan.param_plans if param.unit != ROOT]


def test_each_weight_is_gathered_once_in_the_forward_and_once_in_the_backward(hsdp):
    plan, found = hsdp
    gathers = in_layers(found, "all-gather")
    scatters = in_layers(found, "reduce-scatter")
    (backward,) = scatters
    (forward,) = set(gathers) - {backward}
    rows = unit_params(plan)
    assert shapes(gathers[forward]) == Counter(("f32", r.shape[1:]) for r in rows)
    # Most gradients do not need the value of a bias, and what is not needed is not
    # gathered; every matrix is, and none twice.
    matrices = Counter(("f32", r.shape[1:]) for r in rows if r.name.endswith("kernel"))
    assert shapes(gathers[backward]) >= matrices
    assert shapes(gathers[backward]) <= shapes(gathers[forward])


def test_each_gradient_is_reduce_scattered_once(hsdp):
    plan, found = hsdp
    (scatters,) = in_layers(found, "reduce-scatter").values()
    expected = Counter()
    for param in unit_params(plan):
        shape = list(param.shape[1:])
        shape[param.split.dim - 1] //= 4
        expected[("f32", tuple(shape))] += 1
    assert shapes(scatters) == expected


def test_gathers_stay_within_a_replica(hsdp):
    _, found = hsdp
    inner = [c for c in found if c.op in ("all-gather", "reduce-scatter")]
    assert inner and {group_size(c.groups) for c in inner} == {4}


def shards_of(params, *, sliced) -> Counter:
    shards = Counter()
    for param in params:
        shape = list(param.shape)
        shape[param.split.dim] //= 4
        shards[("f32", tuple(shape[1:] if sliced else shape))] += 1
    return shards


def test_replicas_are_reduced_once_a_step_unit_by_unit_in_the_last_backward(hsdp):
    plan, found = hsdp
    outer = [c for c in found if c.op == "all-reduce" and group_size(c.groups) == 2]
    # The one loop they are in is that over the layers of the last microbatch, which
    # reduce-scatters the same gradients; the microbatches before it are deeper down.
    (loop,) = {c.loops for c in outer if c.loops}
    assert len(loop) == 1
    assert any(c.op == "reduce-scatter" and c.loops == loop for c in found)
    root = [param for param in plan.param_plans if param.unit == ROOT]
    at_the_end = shards_of(root, sliced=False)
    assert shapes([c for c in outer if not c.loops]) == at_the_end
    in_units = shards_of(unit_params(plan), sliced=True)
    assert shapes([c for c in outer if c.loops]) == in_units


def test_nothing_else_is_communicated(hsdp):
    _, found = hsdp
    others = [
        c
        for c in found
        if c.op not in ("all-gather", "reduce-scatter")
        and not (c.op == "all-reduce" and (c.size == 1 or group_size(c.groups) == 2))
    ]
    assert not others


FORMS = {
    "directly": lambda x, w: x @ w,
    "transposed": lambda x, w: jnp.einsum("rd,ed->re", x, w.T),
    "reshaped": lambda x, w: x @ w.reshape(len(w), 4, -1).reshape(len(w), -1),
    "cast": lambda x, w: (
        (x.astype(jnp.float64) @ w.astype(jnp.float64)).astype(x.dtype)
        if jax.config.jax_enable_x64
        else (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype)
    ),
    "scaled": lambda x, w: x @ (w * 0.5),
    "sliced": lambda x, w: jnp.concatenate(
        [x @ w[:, : len(w) // 2], x @ w[:, len(w) // 2 :]], -1
    ),
    "inside a jit": lambda x, w: jax.jit(lambda x, w: x @ jnp.tanh(w))(x, w),
}
WIDTH = 128
WEIGHT_BYTES = WIDTH * WIDTH * 4


def compiled_form(form: str, layers: int, *, reshard: bool):
    def make(key):
        return {"layers": jax.random.normal(key, (layers, WIDTH, WIDTH))}

    def loss(params, batch):
        def layer(w, x):
            return jnp.tanh(FORMS[form](x, w)), None

        y, _ = fsdp.scan(layer, params["layers"], batch)
        return jnp.mean(y**2)

    config = fsdp.FSDPConfig(reshard_after_forward=reshard, prefetch=0)
    plan = fsdp.fully_shard(make, fsdp.make_mesh(), [fsdp.Stacked("layers")], config)
    tx = optax.sgd(0.1)
    step = fsdp.make_train_step(plan, loss, tx)
    rows = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    return step.lower(fsdp.abstract_state(plan, tx), rows).compile()


def bytes_a_layer(form: str, *, reshard: bool) -> float:
    """By how much the temporaries of a step grow with each further layer."""
    few, many = (
        compiled_form(form, n, reshard=reshard).memory_analysis().temp_size_in_bytes
        for n in (4, 12)
    )
    return (many - few) / 8


@pytest.fixture
def all_optimizations():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.parametrize("form", FORMS)
def test_unsharded_weights_are_not_kept_for_backward(form, all_optimizations):
    found = collectives(compiled_form(form, 4, reshard=True).as_text())
    bodies = Counter(c.body for c in found if c.op == "all-gather")
    assert sorted(bodies.values()) == [1, 1]  # one gather in each of two loop bodies
    assert None not in bodies
    # A layer's shards of weight, gradient and update, its activations; not its weight.
    growth = bytes_a_layer(form, reshard=True)
    assert growth < 0.5 * WEIGHT_BYTES


def test_unsharded_weights_that_are_kept_would_be_noticed(all_optimizations):
    found = collectives(compiled_form("scaled", 4, reshard=False).as_text())
    assert sum(c.op == "all-gather" for c in found) == 1
    growth = bytes_a_layer("scaled", reshard=False)
    assert growth > WEIGHT_BYTES


@pytest.mark.parametrize("reshard", [True, False])
def test_resharding_does_not_change_the_numbers(reshard):
    case = CASES["plain pytree"]
    plan = case.plan(fsdp.make_mesh(), reshard_after_forward=reshard)
    _, grads = fsdp.value_and_grad(plan, case.loss)(case.sharded(plan), batch())
    reference = case.plan(fsdp.make_mesh(devices=jax.devices()[:1]))
    _, want = fsdp.value_and_grad(reference, case.loss)(
        case.sharded(reference), batch()
    )
    for (name, a), (_, b) in zip(named_leaves(grads), named_leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "policy, gathered, reduced",
    [
        ({}, "f32", "f32"),
        ({"param_dtype": jnp.bfloat16}, "bf16", "f32"),
        (
            {"param_dtype": jnp.bfloat16, "grad_comm_dtype": jnp.bfloat16},
            "bf16",
            "bf16",
        ),
        ({"grad_comm_dtype": jnp.float16}, "f32", "f16"),
    ],
)
def test_the_dtypes_of_the_policy_are_communicated(policy, gathered, reduced):
    case = CASES["plain pytree"]
    mp_policy = fsdp.MixedPrecisionPolicy(**policy)
    plan = case.plan(fsdp.make_mesh(), mp_policy=mp_policy)
    step = fsdp.make_train_step(plan, case.loss, TX)
    text = step.lower(fsdp.abstract_state(plan, TX), batch()).as_text()
    assert stablehlo_dtypes(text, "all_gather") == {gathered}
    assert stablehlo_dtypes(text, "reduce_scatter") == {reduced}


WIDE_SUMS = fsdp.MixedPrecisionPolicy(
    grad_comm_dtype=jnp.bfloat16, reduce_scatter_with_fp32_accumulation=True
)


def test_gradients_may_be_communicated_narrow_and_summed_wide():
    case = CASES["plain pytree"]
    plan = case.plan(fsdp.make_mesh(), mp_policy=WIDE_SUMS)
    step = fsdp.make_train_step(plan, case.loss, TX)
    text = step.lower(fsdp.abstract_state(plan, TX), batch()).as_text()
    assert "reduce_scatter" not in text
    assert stablehlo_dtypes(text, "all_to_all") == {"bf16"}


def test_what_is_communicated_narrow_is_off_by_no_more_than_one_rounding():
    case = CASES["plain pytree"]
    exact, narrow = (
        fsdp.value_and_grad(plan, case.loss)(case.sharded(plan), batch())[1]
        for plan in (
            case.plan(fsdp.make_mesh()),
            case.plan(fsdp.make_mesh(), mp_policy=WIDE_SUMS),
        )
    )
    # Eight terms, each rounded once to 8 bits: at most 2^-9 of each term.
    error = worst(narrow, exact)
    assert 1e-4 < error < 2**-8


@pytest.fixture(scope="module")
def trained():
    """(plan, state after three steps, names of programs compiled in steps 2 and 3)."""
    case = CASES["nnx scanned"]
    plan = case.plan(fsdp.make_mesh())
    step = fsdp.make_train_step(plan, case.loss, TX)
    state = fsdp.init_state(plan, TX, case.sharded(plan))
    state, _ = step(state, batch())
    with compilations() as heard:
        for _ in range(2):
            state, _ = step(state, batch())
    return plan, state, heard


def test_the_second_step_compiles_nothing(trained):
    _, _, compiled = trained
    assert compiled == []


def test_no_leaf_lies_otherwise_than_planned(trained):
    plan, state, _ = trained
    like = fsdp.abstract_state(plan, TX)
    pairs = zip(named_leaves(state), named_leaves(like), strict=True)
    for (name, leaf), (_, want) in pairs:
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim), name
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype), name


def test_bytes_on_each_device_equal_the_formula(trained):
    plan, state, _ = trained
    elements = sum(np.prod(param.shape) // 8 for param in plan.param_plans)
    count = 4  # Adam's step counter, replicated.
    for device in jax.devices():
        assert bytes_on(device, state.params) == 4 * elements
        assert bytes_on(device, state.opt_state) == 2 * 4 * elements + count
    assert plan.bytes_per_device == {"params": 4 * elements, "grads": 4 * elements}


def test_gradients_take_an_eighth_of_the_parameters_on_each_device():
    case = CASES["plain pytree"]
    policy = fsdp.MixedPrecisionPolicy(main_grads_dtype=jnp.bfloat16)
    plan = case.plan(fsdp.make_mesh(), mp_policy=policy)
    _, grads = fsdp.value_and_grad(plan, case.loss)(case.sharded(plan), batch())
    elements = sum(np.prod(param.shape) // 8 for param in plan.param_plans)
    assert {bytes_on(d, grads) for d in jax.devices()} == {2 * elements}
    assert plan.bytes_per_device["grads"] == 2 * elements


def bytes_on(device, tree) -> int:
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )
