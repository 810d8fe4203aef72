"""The two passes of a fused attention kernel, written down."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class PlainKernel:
    """What cuDNN's kernel computes: it reads whether keys are causal, no positions."""

    def forward(self, query, key, value, scores, places, window):
        products = _products(query, key, scores, places, window)
        top = products.max(-1, keepdims=True)
        weights = jnp.exp(products - top)
        total = weights.sum(-1, keepdims=True)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights / total, _repeated(query, value))
        return out, (top + jnp.log(total))[..., 0]

    def backward(self, *given: Any):
        query, key, value, out, log_sum, grad, scores, places, window = given
        products = _products(query, key, scores, places, window)
        weights = jnp.exp(products - log_sum[..., None])
        of_weights = jnp.einsum("bqhd,bkhd->bhqk", grad, _repeated(query, value))
        delta = jnp.einsum("bqhd,bqhd->bhq", out, grad)[..., None]
        bent = weights * (of_weights - delta) * scores.scale
        of_query = jnp.einsum("bhqk,bkhd->bqhd", bent, _repeated(query, key))
        of_key = jnp.einsum("bhqk,bqhd->bkhd", bent, query)
        of_value = jnp.einsum("bhqk,bqhd->bkhd", weights, grad)
        return of_query, _summed(of_key, key), _summed(of_value, value)


def _products(query, key, scores, places, window):
    assert window is None and scores.softcap is None
    products = scores.scale * jnp.einsum(
        "bqhd,bkhd->bhqk", query, _repeated(query, key)
    )
    if not places.causal:
        return products
    own, other = (jnp.arange(x.shape[1]) for x in (query, key))
    return jnp.where(own[:, None] >= other[None, :], products, -1e30)


def _repeated(query, heads):
    return jnp.repeat(heads, query.shape[2] // heads.shape[2], axis=2)


def _summed(grads, heads):
    batch, seq, kv_heads, width = heads.shape
    return grads.reshape(batch, seq, kv_heads, -1, width).sum(3)
