"""Products in float8 take weights as `Float8Gather` communicated them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.compare import host
from jax.extend.core import jaxprs_in_params

import fsdp_jax as fsdp
from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    MoEConfig,
    float8_grouped_matmul,
    float8_product,
    tensor_parallel_rules,
)
from fsdp_jax.cli._decoder_loss import next_token_loss
from fsdp_jax.step import Float8Weight, gathered_float8

# A rounding of weights is told by its number of elements: a rank's shard of a stack of
# three layers, which is rounded for the gather, has as many as no layer's weight.
LAYERS = 3
DENSE = DecoderConfig(
    vocab_size=32,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
)
SPARSE = DecoderConfig(
    vocab_size=32,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    moe=MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=24),
)
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 17)).astype(np.int32)


def own_loop(unit, stacked, carry, xs=(), consts=()):
    """A loop of the model's own."""
    enter = fsdp.unit(unit)

    def body(carry, slices):
        own, x = slices
        return enter(own, carry, *x, *consts)

    return jax.lax.scan(body, carry, (stacked, xs))


def unrolled(unit, stacked, carry, xs=(), consts=()):
    """Layers one after the other."""
    enter, ys = fsdp.unit(unit), []
    for i in range(LAYERS):
        own, x = jax.tree.map(lambda leaf, i=i: leaf[i], (stacked, xs))
        carry, y = enter(own, carry, *x, *consts)
        ys.append(y)
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)


SCANS = {
    "prefetched by the call": functools.partial(fsdp.scan, prefetch=1),
    "prefetched by the plan": fsdp.scan,
    "gathered at entry": functools.partial(fsdp.scan, prefetch=0),
    "a loop of its own": own_loop,
    "unrolled": unrolled,
}


def plan_of(config, scan, rounded, *, gather=True, **settings: Any):
    """A plan of a decoder that multiplies in float8."""

    def make(key):
        return Decoder(
            config,
            rngs=nnx.Rngs(key),
            scan=scan,
            product=functools.partial(float8_product, rounded=rounded),
            expert_product=functools.partial(float8_grouped_matmul, rounded=rounded),
        )

    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16,
        param_gather=fsdp.sharding.Float8Gather(min_elements=1) if gather else None,
    )
    mesh = settings.pop("mesh", {})
    devices = jax.devices()[: settings.pop("devices", 4)]
    return fsdp.fully_shard(
        make,
        fsdp.make_mesh(devices=devices, **mesh),
        [DecoderLayer],
        fsdp.FSDPConfig(mp_policy=policy, **settings),
    )


def computed(plan):
    """The loss and gradients, and the sizes of weights that are rounded for them."""
    params = fsdp.init_params(plan, jax.random.key(0))
    compute = fsdp.value_and_grad(plan, next_token_loss)
    (value, _), grads = compute(params, TOKENS)
    traced = jax.make_jaxpr(compute)(params, TOKENS)
    return (float(value), host(grads)), weights_rounded(plan, traced.jaxpr)


def weights_rounded(plan, jaxpr):
    """Sizes of the unsharded weights that are rounded to float8, in all of a trace."""
    sizes = {
        int(np.prod(param.shape[param.num_stacked :]))
        for param in plan.param_plans
        if param.gather is not None
    }
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type":
            (made,) = eqn.outvars
            if made.aval.dtype == jnp.float8_e4m3fn and made.aval.size in sizes:
                found.append(made.aval.size)
        for inner in jaxprs_in_params(eqn.params):
            found += weights_rounded(plan, inner)
    return found


def is_equal(one, other):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


CASES = [
    pytest.param(DENSE, scan, {}, id=f"dense, {name}") for name, scan in SCANS.items()
] + [
    pytest.param(SPARSE, fsdp.scan, {}, id="experts"),
    pytest.param(DENSE, fsdp.scan, {"reshard_after_forward": False}, id="kept"),
    pytest.param(DENSE, fsdp.scan, {"zero_dp_strategy": 1}, id="ZeRO-1"),
]


@pytest.mark.parametrize("config, scan, settings", CASES)
def test_no_weight_is_rounded_again_and_the_numbers_are_the_same(
    config, scan, settings
):
    found, rounded = computed(plan_of(config, scan, gathered_float8, **settings))
    wanted, again = computed(plan_of(config, scan, None, **settings))
    assert is_equal(found, wanted)
    assert not rounded
    # Each of a layer's products rounds its weights, forward and backward.
    assert len(again) >= 10


def test_under_tensor_parallelism_too():
    split: dict[str, Any] = {
        "mesh": {"tp": 2},
        "tensor_parallel": tensor_parallel_rules(DENSE, 2),
    }
    found, rounded = computed(plan_of(DENSE, fsdp.scan, gathered_float8, **split))
    wanted, _ = computed(plan_of(DENSE, fsdp.scan, None, **split))
    assert is_equal(found, wanted) and not rounded


def test_without_a_float8_gather_weights_are_rounded_by_their_products():
    plans = [
        plan_of(DENSE, fsdp.scan, own, gather=False) for own in (gathered_float8, None)
    ]
    (found, _), (wanted, _) = map(computed, plans)
    assert is_equal(found, wanted)


def test_only_the_weight_itself_has_numbers():
    seen = {}

    @fsdp.unit
    def head(w, x):
        seen["itself"] = gathered_float8(w)
        seen["transposed"] = gathered_float8(w.T)
        seen["activations"] = gathered_float8(x)
        return x @ w.astype(x.dtype)

    def loss(model, batch):
        out = head(model["head"], batch)
        seen["outside"] = gathered_float8(batch)
        return jnp.mean(out**2)

    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16,
        param_gather=fsdp.sharding.Float8Gather(min_elements=1),
    )
    plan = fsdp.fully_shard(
        lambda key: {"head": jax.random.normal(key, (16, 8))},
        fsdp.make_mesh(),
        ["head"],
        fsdp.FSDPConfig(mp_policy=policy),
    )
    params = fsdp.init_params(plan, jax.random.key(0))
    fsdp.make_eval_step(plan, loss)(params, np.ones((8, 16), np.float32))
    itself = seen.pop("itself")
    assert isinstance(itself, Float8Weight) and itself.bits.shape == (16, 8)
    assert set(seen.values()) == {None} and len(seen) == 3
    assert gathered_float8(jnp.ones((16, 8))) is None
