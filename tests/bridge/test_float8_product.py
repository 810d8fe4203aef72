"""Products in float8: what is rounded, to what, and what is not rounded again."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.compare import worst
from helpers.errors import facts

from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    float8_product,
    mxfp8_product,
)
from bridge.models._float8 import plain_product
from bridge.models._linear import Linear
from fsdp_jax.sharding._float8_gather import decode_float8, encode_float8

ROWS, HEADS, WIDTH, OUT = 6, 3, 4, 5


def arrays(scale=1.0):
    random = np.random.default_rng(0)
    shapes = [(2, ROWS, HEADS, WIDTH), (HEADS, WIDTH, OUT), (2, ROWS, OUT)]
    return [jnp.asarray(scale * random.normal(size=s), jnp.float32) for s in shapes]


@functools.partial(jax.jit, static_argnums=0)
def results(product, x, kernel, grad):
    out, pull = jax.vjp(lambda x, kernel: product(x, kernel, 2), x, kernel)
    return out, *pull(grad)


# A power of two, so that float32 has all sums of products of e4m3 or e5m2 numbers.
@pytest.mark.parametrize("scale", [1.0, 2.0**-40])
def test_operands_and_gradients_are_rounded_once_at_any_magnitude(scale):
    x, kernel, grad = arrays(scale)

    def rounded(a, dtype):
        # The least power of two at which the largest number fits.
        a, limit = np.asarray(a), float(jnp.finfo(dtype).max)
        scale = np.float32(2.0 ** np.ceil(np.log2(np.abs(a).max() / limit)))
        return jnp.asarray((a / scale).astype(dtype).astype(np.float32) * scale)

    x8, kernel8 = rounded(x, jnp.float8_e4m3fn), rounded(kernel, jnp.float8_e4m3fn)
    exact = results(plain_product, x8, kernel8, rounded(grad, jnp.float8_e5m2))
    found = results(float8_product, x, kernel, grad)
    assert worst(found, exact) < 1e-6  # Sums in float32, in another order.
    # A control: without rounding they differ as e4m3 and e5m2 do.
    assert 1e-3 < worst(found, results(plain_product, x, kernel, grad)) < 0.2


def test_a_weight_from_a_float8_gather_is_not_rounded_again():
    x, kernel, _ = arrays(0.02)
    largest = jnp.abs(kernel).max()
    gathered = decode_float8(encode_float8(kernel, largest), jnp.bfloat16)
    identity = jnp.eye(HEADS * WIDTH).reshape(-1, HEADS, WIDTH)
    found = float8_product(identity, gathered.astype(jnp.float32), 2)
    np.testing.assert_array_equal(found.reshape(gathered.shape), gathered)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_in_16_bits_the_sums_of_float32_are_rounded_once(dtype):
    narrow = [x.astype(dtype) for x in arrays()]
    wide = results(float8_product, *(x.astype(jnp.float32) for x in narrow))
    found = results(float8_product, *narrow)
    for one, other in zip(found, wide, strict=True):
        np.testing.assert_array_equal(one, other.astype(dtype))
        assert worst(one, other) > 1e-5  # They are in 16 bits.


def test_backward_keeps_activations_in_a_byte_and_no_copy_of_weights():
    x, kernel, _ = arrays()

    def backward_of(x, kernel):
        return jax.vjp(lambda x, kernel: float8_product(x, kernel, 2), x, kernel)[1]

    saved = jax.tree.leaves(jax.eval_shape(backward_of, x, kernel))
    kept = sorted((leaf.dtype.name, leaf.size) for leaf in saved if leaf.size > 1)
    assert kept == [("float32", kernel.size), ("uint8", x.size)]


def test_what_is_not_finite_is_seen():
    x, kernel, _ = arrays()
    assert not jnp.isfinite(
        float8_product(x.at[0, 0, 0, 0].set(jnp.inf), kernel, 2)
    ).any()
    assert jnp.all(float8_product(jnp.zeros_like(x), kernel, 2) == 0)


def test_the_projections_of_a_decoder_take_it_and_head_and_router_do_not():
    config = DecoderConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    decoder = nnx.eval_shape(
        lambda: Decoder(config, rngs=nnx.Rngs(0), product=float8_product)
    )
    found = {
        ".".join(map(str, path)): module.product is float8_product
        for path, module in nnx.iter_modules(decoder)
        if isinstance(module, Linear)
    }
    assert not found.pop("lm_head")
    assert len(found) == 7 and all(found.values())
    assert isinstance(decoder.layers, DecoderLayer)


# In blocks


def in_blocks(x, axis):
    """Rounded by hand, with a power of two for each 32 numbers along `axis`."""
    x = np.moveaxis(np.asarray(x), axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    scale = np.float32(2.0 ** np.ceil(np.log2(largest / 448)))
    rounded = (blocks / scale).astype(jnp.float8_e4m3fn).astype(np.float32) * scale
    return np.moveaxis(rounded.reshape(x.shape), -1, axis)


def matrices():
    random = np.random.default_rng(0)
    shapes = [(32, 64), (64, 96), (32, 96)]
    x, kernel, grad = (jnp.asarray(random.normal(size=s), jnp.float32) for s in shapes)
    return x.at[:, 0].multiply(1000), kernel, grad  # In its own blocks alone.


def in_mxfp8(x, kernel, grad):
    out, pull = jax.vjp(lambda x, kernel: mxfp8_product(x, kernel, 1), x, kernel)
    return out, *pull(grad)


def test_blocks_of_32_along_what_is_contracted_have_a_scale_of_their_own():
    x, kernel, grad = matrices()
    want = (
        in_blocks(x, 1) @ in_blocks(kernel, 0),
        in_blocks(grad, 1) @ in_blocks(kernel, 1).T,
        in_blocks(x, 0).T @ in_blocks(grad, 0),
    )
    assert worst(jax.jit(in_mxfp8)(x, kernel, grad), want) < 1e-6
    # A control: with a scale a tensor the small numbers beside large ones are lost.
    rest = x.at[:, 0].set(0)
    errors = [
        worst(product(x, kernel, 1) - product(x - rest, kernel, 1), rest @ kernel)
        for product in (mxfp8_product, float8_product)
    ]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("sizes", [(31, 64, 96), (32, 60, 96), (32, 64, 90)])
def test_sizes_that_are_no_blocks_are_refused(sizes):
    rows, depth, out = sizes
    with pytest.raises(ValueError, match=facts(*map(str, sizes), "32")):
        mxfp8_product(jnp.ones((rows, depth)), jnp.ones((depth, out)), 1)
