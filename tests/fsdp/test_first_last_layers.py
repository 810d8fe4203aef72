"""First and last layers multiply in the dtype of the weights, others in float8."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.compare import host, worst
from helpers.errors import facts

import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, DecoderLayer, float8_product
from bridge.models._float8 import plain_product
from fsdp_jax.cli._decoder import next_token_loss, plan_decoder

LAYERS = 4
CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
)
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 17)).astype(np.int32)
POLICY = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
POLICIES = jax.checkpoint_policies


def computed(start=0, end=0, products="float8", mesh=None, prefetch=1, **config):
    """Loss and gradients, from the same weights on any mesh."""
    config = fsdp.FSDPConfig(mp_policy=POLICY, **config)
    plan = plan_decoder(
        CONFIG,
        fsdp.make_mesh(**(mesh or {})),
        config,
        prefetch=prefetch,
        products=products,
        num_layers_at_start_in_bf16=start,
        num_layers_at_end_in_bf16=end,
    )
    params = fsdp.init_params(plan, jax.random.key(0))
    microbatches = 2 if (mesh or {}).get("pp") else 1
    compute = fsdp.value_and_grad(plan, next_token_loss, num_microbatches=microbatches)
    (value, _), grads = compute(params, TOKENS)
    return float(value), host(grads)


same = functools.cache(computed)


def is_equal(one, other):
    equal = jax.tree.map(np.array_equal, one, other)
    return all(jax.tree.leaves(equal))


@pytest.mark.parametrize("start, end", [(LAYERS, 0), (1, LAYERS - 1)])
def test_with_all_layers_kept_the_numbers_are_those_of_bfloat16(start, end):
    assert is_equal(computed(start, end), same(products="param_dtype"))
    assert not is_equal(same(), same(products="param_dtype"))


def by_hand(start, end):
    """Loss and gradients of the layers one after the other, on one device."""

    def scan(unit, stacked, carry, xs=(), consts=(), **static):
        ys = []
        for i in range(LAYERS):
            own, x = jax.tree.map(lambda a, i=i: a[i], (stacked, xs))
            given = {name: values[i] for name, values in static.items()}
            carry, y = unit(own, carry, *x, *consts, **given)
            ys.append(y)
        return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)

    plan = plan_decoder(CONFIG, fsdp.make_mesh(devices=jax.devices()[:1]))
    params = fsdp.unshard(fsdp.init_params(plan, jax.random.key(0)))
    model = Decoder(
        CONFIG,
        rngs=nnx.Rngs(0),
        scan=scan,
        product=float8_product,
        num_layers_at_start_in_bf16=start,
        num_layers_at_end_in_bf16=end,
    )
    made = nnx.split(model)[0]
    return made, params


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("policy", [None, "nothing_saveable", "dots_saveable"])
def test_gathered_ahead_or_not_and_whatever_is_saved_they_are_the_same(
    prefetch, policy
):
    saved = policy and getattr(POLICIES, policy)
    found = computed(1, 2, prefetch=prefetch, remat_policy=saved)
    assert found[0] == same(1, 2)[0]
    assert worst(found[1], same(1, 2)[1]) < 1e-2  # Gradients are summed in bfloat16.
    # A control: one layer more or less in float8 changes gradients by more.
    assert min(worst(same(*k)[1], same(1, 2)[1]) for k in [(1, 1), (2, 2)]) > 2e-2


@pytest.mark.parametrize(
    "mesh", [{"pp": 2}, {"pp": 2, "tp": 2}, {"tp": 2}, {"dp_outer": 2}], ids=str
)
def test_on_any_mesh_they_are_the_same_but_for_rounding(mesh):
    value, grads = computed(1, 1, mesh=mesh)
    assert value == pytest.approx(same(1, 1)[0], rel=1e-3)


def product_of(model):
    return model.products


def test_a_layer_is_told_its_own_product():
    model = nnx.eval_shape(
        lambda: Decoder(
            CONFIG,
            rngs=nnx.Rngs(0),
            product=float8_product,
            num_layers_at_start_in_bf16=1,
            num_layers_at_end_in_bf16=2,
        )
    )
    assert model.products == (plain_product, float8_product, *[plain_product] * 2)
    assert isinstance(model.layers, DecoderLayer)  # Still one stack, as in files.


@pytest.mark.parametrize(
    "given, shown",
    [((-1, 0), ("-1", "4")), ((3, 2), ("3", "2", "4 layers"))],
)
def test_layers_that_there_are_not_are_refused(given, shown):
    with pytest.raises(ValueError, match=facts(*shown)):
        computed(*given)


def test_layers_kept_without_a_product_to_keep_them_from_are_refused():
    with pytest.raises(ValueError, match=facts("num_layers_at_end_in_bf16=1")):
        computed(0, 1, products="param_dtype")
