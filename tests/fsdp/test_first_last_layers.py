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
from bridge.models._layer_loop import plain_scan
from bridge.models._layer_products import PLAIN, LayerProducts
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._decoder_loss import next_token_loss
from fsdp_jax.cli._precision import Products

LAYERS = 4
CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (8, 17)), jnp.int32)


@functools.cache
def computed(start=0, end=0, products: Products = "float8", pp=1, tp=1):
    """Loss and gradients, from the same weights on any mesh."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    plan = plan_decoder(
        CONFIG,
        fsdp.make_mesh(pp=pp, tp=tp, devices=jax.devices()[: 2 * max(pp, tp)]),
        fsdp.FSDPConfig(mp_policy=policy),
        products=products,
        num_layers_at_start_in_bf16=start,
        num_layers_at_end_in_bf16=end,
    )
    params = fsdp.init_params(plan, jax.random.key(0))
    compute = fsdp.value_and_grad(plan, next_token_loss, num_microbatches=pp)
    (value, _), grads = compute(params, TOKENS)
    return float(value), host(grads)


def is_equal(one, other):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


def test_with_all_layers_kept_the_numbers_are_those_of_bfloat16():
    plain = computed(products="param_dtype")
    assert is_equal(computed(1, LAYERS - 1), plain)
    assert not is_equal(computed(), plain)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}], ids=str)
def test_on_any_mesh_they_are_the_same_but_for_rounding(mesh):
    # Scales of float8 are those of a rank: what is near is near by some roundings.
    value, grads = computed(1, 2, **mesh)
    assert value == pytest.approx(computed(1, 2)[0], rel=2e-3)
    assert worst(grads, computed(1, 2)[1]) < 0.1
    # A control: it is another number than that of layers that are all kept.
    assert value != computed(products="param_dtype")[0]


def decoder(scan, **kept):
    return Decoder(CONFIG, rngs=nnx.Rngs(0), scan=scan, product=float8_product, **kept)


def by_hand(unit, stacked, carry, xs=(), consts=(), static=None):
    """The layers one after the other, each told its own product."""
    ys = []
    for i in range(LAYERS):
        own, x = jax.tree.map(lambda a, i=i: a[i], (stacked, xs))
        given = {} if static is None else {"static": static[i]}
        carry, y = unit(own, carry, *x, *consts, **given)
        ys.append(y)
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)


def test_each_layer_multiplies_as_if_it_were_alone():
    kept = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2}
    logits = [
        np.asarray(decoder(scan, **given)(TOKENS), np.float32)
        for scan, given in [(plain_scan, kept), (by_hand, kept), (plain_scan, {})]
    ]
    assert worst(logits[0], logits[1]) < 1e-5  # Float32.
    assert worst(logits[0], logits[2]) > 5e-3


def test_a_stack_stays_one_as_it_is_in_files():
    kept = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2}
    model = nnx.eval_shape(lambda: decoder(plain_scan, **kept))
    assert model.products == (PLAIN, LayerProducts(float8_product), PLAIN, PLAIN)
    assert isinstance(model.layers, DecoderLayer)


@pytest.mark.parametrize(
    "given, shown",
    [((-1, 0), ("-1", "4 layers")), ((3, 2), ("3", "2", "4 layers"))],
)
def test_layers_that_there_are_not_are_refused(given, shown):
    with pytest.raises(ValueError, match=facts(*shown)):
        computed(*given)


def test_layers_kept_without_a_product_to_keep_them_from_are_refused():
    with pytest.raises(ValueError, match=facts("num_layers_at_end_in_bf16=1", "4")):
        computed(0, 1, products="param_dtype")


def test_products_in_blocks_are_refused_under_tensor_parallelism():
    with pytest.raises(ValueError, match=facts("mxfp8_product", "tp=1")):
        computed(products="mxfp8", tp=2)
