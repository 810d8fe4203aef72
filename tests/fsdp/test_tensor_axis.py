"""Parameters split over `tp` besides: gathered and reduced at tp width."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host, worst
from helpers.errors import facts
from helpers.hlo import collectives, group_size
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp

TX = optax.adamw(1e-2, eps=1e-3)
LAYERS, EMBED, MLP, ROWS, SEQ = 3, 12, 64, 16, 20
# Columns of `up`, rows of `down`, heads of the attention; and of what has no other dim
# that eight devices divide, the same dim that data axes split.
TENSOR = {"layers.up": 1, "layers.down": -2, "layers.qkv": 2, "layers.out": 0}
TENSOR |= {"layers.bias": 0, "layers.mix": 1}
ODD = 7


def make_weights(key):
    up, down, qkv, out = jax.random.split(key, 4)
    return {
        "layers": {
            "norm": jnp.ones((LAYERS, EMBED)),
            "q_norm": jnp.ones((LAYERS, 8)),
            "qkv": 0.3 * jax.random.normal(qkv, (LAYERS, EMBED, 3, 4, 8)),
            "out": 0.3 * jax.random.normal(out, (LAYERS, 4, 8, EMBED)),
            "up": 0.3 * jax.random.normal(up, (LAYERS, EMBED, MLP)),
            "bias": jnp.zeros((LAYERS, MLP)),
            "mix": jnp.linspace(-1.0, 1.0, LAYERS * ODD * MLP).reshape(-1, ODD, MLP),
            "down": 0.3 * jax.random.normal(down, (LAYERS, MLP, EMBED)),
        },
        "head": 0.3 * jax.random.normal(key, (EMBED, EMBED)),
    }


def rms(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def constrain(x, *spec):
    """Lays an activation over `tp`; without such a mesh, nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape.get("tp", 1) == 1 or "tp" in mesh.manual_axes:
        return x
    return jax.lax.with_sharding_constraint(x, P(*spec))


def layer(w, x):
    # Sequence parallel: norms see a part of the sequence on each tp rank.
    x = constrain(x, None, "tp", None)
    q, k, v = jnp.einsum("bse,ethd->tbshd", rms(x, w["norm"][None, None]), w["qkv"])
    q = rms(q, w["q_norm"][None, None, None])
    q, k, v = (constrain(heads, None, None, "tp", None) for heads in (q, k, v))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    mixed = constrain(jnp.einsum("bhqk,bkhd->bqhd", scores, v), None, None, "tp", None)
    x = x + constrain(jnp.einsum("bqhd,hde->bqe", mixed, w["out"]), None, "tp", None)
    hidden = jnp.tanh(x @ w["up"] + w["bias"][None, None])
    hidden = hidden * jnp.sin(w["mix"]).sum(0)[None, None]
    return x + constrain(hidden, None, None, "tp") @ w["down"], None


def loss_fn(weights, batch):
    x, _ = fsdp.scan(layer, weights["layers"], batch["x"])
    return jnp.mean((x @ weights["head"] - batch["y"]) ** 2)


def batch(dtype=np.float32):
    random = np.random.default_rng(0)
    shape = (ROWS, SEQ, EMBED)
    return {name: random.normal(size=shape).astype(dtype) for name in "xy"}


def plan_of(mesh, **config):
    return fsdp.fully_shard(
        make_weights, mesh, [fsdp.Stacked("layers")], fsdp.FSDPConfig(**config)
    )


def trained(plan, num_microbatches=1):
    step = fsdp.make_train_step(plan, loss_fn, TX, num_microbatches=num_microbatches)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    for _ in range(3):
        state, metrics = step(state, batch(np.float64))
    return host(state.params), float(metrics["loss"])


@pytest.fixture(scope="module")
def one_device():
    with jax.enable_x64(True):
        return trained(plan_of(fsdp.make_mesh(devices=jax.devices()[:1])))


MESHES = {
    "fsdp 2 x tp 4": ({"tp": 4}, {}),
    "hfsdp": ({"dp_outer": 2, "tp": 2}, {"outer_dp_sharding_strategy": 1}),
    "ddp 4 x tp 2": ({"tp": 2}, {"zero_dp_strategy": 0}),
}
# What is communicated in float32 is summed in float64: one number's rounding, thrice.
COMMUNICATED_NARROW = 1e-6


@pytest.mark.parametrize("name", MESHES)
def test_with_a_tensor_axis_the_numbers_are_those_of_one_device(name, one_device):
    sizes, config = MESHES[name]
    with jax.enable_x64(True):
        plan = plan_of(fsdp.make_mesh(**sizes), tensor_parallel=TENSOR, **config)
        params, loss = trained(plan, num_microbatches=2)
    want, want_loss = one_device
    # Norms of a sequence-parallel stream and of split heads are among them.
    assert worst(params, want) < 1e-9
    assert abs(loss - want_loss) < 1e-9


def test_sums_wider_than_what_is_communicated_are_those_of_one_device(one_device):
    with jax.enable_x64(True):
        policy = fsdp.MixedPrecisionPolicy(
            main_grads_dtype=jnp.float64,
            grad_comm_dtype=jnp.float32,
            reduce_scatter_with_fp32_accumulation=True,
        )
        plan = plan_of(fsdp.make_mesh(tp=2), tensor_parallel=TENSOR, mp_policy=policy)
        params, _ = trained(plan)
    assert 1e-9 < worst(params, one_device[0]) < COMMUNICATED_NARROW


@pytest.fixture(scope="module")
def plan():
    return plan_of(fsdp.make_mesh(tp=2), tensor_parallel=TENSOR)


def test_parameters_lie_over_both_axes_on_different_dims(plan):
    specs = {
        param.name: param.spec_with_tp(param.placements.optimizer)
        for param in plan.param_plans
    }
    assert specs["layers.up"] == P(None, "dp_shard", "tp")
    assert specs["layers.down"] == P(None, "tp", "dp_shard")
    assert specs["layers.norm"] == P(None, "dp_shard")
    assert specs["layers.bias"] == P(None, ("tp", "dp_shard"))
    assert specs["layers.mix"] == P(None, None, ("tp", "dp_shard"))
    assert "dim 1 over dp_shard, dim 2 over tp" in repr(plan)
    assert "dim 2 over tp x dp_shard" in repr(plan)
    assert "replicated over tp: head" in repr(plan)
    held = sum(
        param.num_elements(plan.mesh, param.placements.optimizer)
        for param in plan.param_plans
    )
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    leaves = jax.tree.leaves(state.params)
    assert held == sum(leaf.addressable_shards[0].data.size for leaf in leaves)
    moments = [m for m in jax.tree.leaves(state.opt_state) if m.ndim]
    assert 2 * held == sum(m.addressable_shards[0].data.size for m in moments)


@pytest.mark.parametrize("wide", [False, True], ids=["reduce-scatter", "all-to-all"])
def test_weights_are_gathered_and_reduced_at_tp_width(wide):
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16,
        grad_comm_dtype=jnp.bfloat16,
        reduce_scatter_with_fp32_accumulation=wide,
    )
    # Plain loops: the window of one that prefetches is gathered before it too.
    plan = plan_of(
        fsdp.make_mesh(tp=2), tensor_parallel=TENSOR, mp_policy=policy, prefetch=0
    )
    step = fsdp.make_train_step(plan, loss_fn, TX)
    lowered = step.lower(fsdp.abstract_state(plan, TX), batch())
    found = collectives(lowered.compile().as_text())
    data = [c for c in found if group_size(c.groups) == 4]
    split = [param for param in plan.param_plans if param.split.tensor_dim is not None]
    assert len(split) == 6
    for param in split:
        whole = int(np.prod(param.shape[1:]))
        gathers = [c.size for c in data if c.op == "all-gather"]
        assert whole // 2 in gathers, param.name
    # By bytes: what all gathers of a layer bring is the layer at tp width.
    in_loop = [c for c in data if c.op == "all-gather" and c.loops]
    width = {
        param.name: int(np.prod(param.shape[1:]))
        // (2 if param.split.tensor_dim else 1)
        for param in plan.param_plans
        if param.num_stacked
    }
    assert sum(c.size for c in in_loop) <= 2 * sum(width.values())
    op = "all-to-all" if wide else "reduce-scatter"
    reduced = [c for c in data if c.op == op and c.loops]
    share = 1 if wide else 4  # The result of an all-to-all is as large as its operand.
    assert sum(c.size for c in reduced) == sum(width.values()) // share
    # Of matrices nothing crosses tp: activations do, and gradients of norms and biases.
    across = [c for c in found if group_size(c.groups) == 2]
    largest = ROWS // 4 * SEQ * max(MLP, 3 * 4 * 8)
    assert all(c.size <= largest for c in across)
    weights = {int(np.prod(param.shape[1:])) for param in split}
    weights |= {size // 2 for size in weights}
    assert not [c for c in across if c.op == "all-gather" and c.size in weights]


def test_communicated_bf16_is_summed_in_float32_at_tp_width():
    results = {}
    for wide in (False, True):
        policy = fsdp.MixedPrecisionPolicy(
            grad_comm_dtype=jnp.bfloat16, reduce_scatter_with_fp32_accumulation=wide
        )
        plan = plan_of(fsdp.make_mesh(tp=2), tensor_parallel=TENSOR, mp_policy=policy)
        step = fsdp.make_train_step(plan, loss_fn, TX)
        text = step.lower(fsdp.abstract_state(plan, TX), batch()).as_text()
        op = "all_to_all" if wide else "reduce_scatter"
        results[wide] = re.findall(
            rf'"stablehlo\.{op}".*?-> tensor<[\dx]*(\w+)>', text, re.DOTALL
        )
    assert set(results[True]) == set(results[False]) == {"bf16"}


def test_a_tensor_axis_without_rules_is_refused():
    with pytest.raises(
        ValueError, match=facts("tp=2", "FSDPConfig(tensor_parallel=...)")
    ):
        plan_of(fsdp.make_mesh(tp=2))


def test_dims_that_tp_does_not_divide_are_all_named():
    with pytest.raises(ValueError) as error:
        plan_of(
            fsdp.make_mesh(tp=8), tensor_parallel={"layers.out": 0, "layers.qkv": 1}
        )
    says = str(error.value)
    assert "'layers.out' (3, 4, 8, 12): dim 1" in says
    assert "'layers.qkv' (3, 12, 3, 4, 8): dim 2" in says


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"layers.up": 5}, ["dim 5", "'layers.up'", "2"]),
        ({"layers.up": 1, "layers.down": -3}, ["dim -3", "'layers.down'"]),
        ({"layers.norm": 0}, ["tp=2", "dp_shard"]),
    ],
)
def test_rules_that_split_nothing_are_refused(rules, message):
    with pytest.raises(
        ValueError, match=facts("FSDPConfig(tensor_parallel=...)", *message)
    ):
        plan_of(fsdp.make_mesh(tp=2), tensor_parallel=rules)
