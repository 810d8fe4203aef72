"""Products in float8 are saved for backward in no form that makes NaN of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp

LAYERS, WIDTH = 2, 16
POLICIES = jax.checkpoint_policies


def make_weights(key):
    return {"layers": {"w": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 4}}


def in_float8(x):
    """Scaled such that the largest is 448, the largest that float8_e4m3fn holds."""
    scale = 448 / jax.lax.stop_gradient(jnp.abs(x).max())
    return (x * scale).astype(jnp.float8_e4m3fn), scale


@jax.custom_vjp
def product(x, w):
    return _forward(x, w)[0]


def _forward(x, w):
    (qx, x_scale), (qw, w_scale) = in_float8(x), in_float8(w)
    # Moved about in float8 too, as heads are.
    qx = qx.reshape(2, -1, qx.shape[-1]).reshape(qx.shape)
    out = jnp.dot(qx, qw, preferred_element_type=jnp.float32) / (x_scale * w_scale)
    return out, (qx, x_scale, qw, w_scale)


def _backward(residuals, grad):
    qx, x_scale, qw, w_scale = residuals
    x, w = qx.astype(jnp.float32) / x_scale, qw.astype(jnp.float32) / w_scale
    return grad @ w.T, x.T @ grad


product.defvjp(_forward, _backward)


def layer(w, x):
    return x + jnp.tanh(product(x, w["w"])), None


def loss_of(unit, **options):
    def loss(weights, batch):
        out, _ = fsdp.scan(unit, weights["layers"], batch, **options)
        return jnp.mean(out**2)

    return loss


def grads_of(loss, **config):
    mesh = fsdp.make_mesh(devices=jax.devices()[:2])
    units = [fsdp.Stacked("layers")]
    plan = fsdp.fully_shard(make_weights, mesh, units, fsdp.FSDPConfig(**config))
    params = fsdp.init_params(plan, jax.random.key(0))
    batch = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
    (value, _), grads = fsdp.value_and_grad(plan, loss)(params, batch)
    return float(value), np.asarray(fsdp.unshard(grads)["layers"]["w"])


@functools.cache
def saving_nothing():
    return grads_of(loss_of(layer), remat_policy=POLICIES.nothing_saveable)


@pytest.mark.parametrize(
    "policy, prefetch",
    [(None, 0), (None, 1)]
    + [(POLICIES.everything_saveable, ahead) for ahead in (0, 1)]
    + [(POLICIES.dots_saveable, 0)],
)
def test_whatever_is_saved_the_numbers_are_those_of_saving_nothing(policy, prefetch):
    # The same sums in the same order: what is saved, or computed again, is the same.
    want = saving_nothing()
    value, grads = grads_of(loss_of(layer, prefetch=prefetch), remat_policy=policy)
    assert value == pytest.approx(want[0], rel=1e-6)
    np.testing.assert_allclose(grads, want[1], rtol=1e-5, atol=1e-7)
    assert np.abs(grads).max() > 0


def test_an_argument_of_a_unit_in_float8_is_refused():
    def loss(weights, batch):
        codes, _ = in_float8(batch)
        codes = jnp.broadcast_to(codes, (LAYERS, *codes.shape))

        def unit(w, x, q):
            return x + q.astype(x.dtype) @ w["w"], None

        out, _ = fsdp.scan(unit, weights["layers"], batch, (codes,))
        return jnp.mean(out**2)

    with pytest.raises(ValueError, match=facts("float8_e4m3fn[4, 16]")):
        grads_of(loss)
    _, grads = grads_of(loss, reshard_after_forward=False)
    assert np.isfinite(grads).all()
