"""A Llama as a plain tree of stacked weights, of any size, for what only compiles."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

import fsdp_jax as fsdp

BF16 = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.bfloat16)
RECOMPUTE = jax.checkpoint_policies.nothing_saveable
UNITS = (fsdp.Stacked("layers"), fsdp.Stacked("head"))


@dataclasses.dataclass(frozen=True)
class Llama:
    """Sizes; the head's weights are stacked by pieces of the vocabulary."""

    width: int = 2048
    mlp: int = 5632
    heads: int = 16
    kv_heads: int = 8
    layers: int = 4
    vocab: int = 32000
    pieces: int = 4
    head_dim: int = 128

    def make(self, key):
        del key  # Nobody looks at the numbers.

        def weights(*shape):
            return jnp.zeros(shape, jnp.float32)

        n, d, q, kv = self.layers, self.width, self.heads, self.kv_heads
        return {
            "embed": weights(self.vocab, d),
            "layers": {
                "q": weights(n, d, q * self.head_dim),
                "k": weights(n, d, kv * self.head_dim),
                "v": weights(n, d, kv * self.head_dim),
                "o": weights(n, q * self.head_dim, d),
                "gate": weights(n, d, self.mlp),
                "up": weights(n, d, self.mlp),
                "down": weights(n, self.mlp, d),
                "norm": weights(n, 2, d),
            },
            "norm": weights(d),
            "head": weights(self.pieces, d, self.vocab // self.pieces),
        }

    def plan(self, mesh=None, **config):
        """Its plan; in bfloat16, recomputing all activations, unless told otherwise."""
        config = {"mp_policy": BF16, "remat_policy": RECOMPUTE} | config
        mesh = mesh or fsdp.make_mesh()
        return fsdp.fully_shard(self.make, mesh, UNITS, fsdp.FSDPConfig(**config))

    def loss(self, prefetch=1, unroll=1):
        """A loss of `(params, tokens)` whose scans gather so far ahead."""
        scan = functools.partial(fsdp.scan, prefetch=prefetch, unroll=unroll)

        def loss(params, tokens):
            x, labels = tokens[:, :-1], tokens[:, 1:]
            x, _ = scan(self._block, params["layers"], params["embed"][x])
            x = _norm(x, params["norm"])
            _, parts = scan(_piece, params["head"], jnp.int32(0), consts=(x, labels))
            log_sums, own = parts
            return jnp.mean(jax.nn.logsumexp(log_sums, 0) - own.sum(0))

        return loss

    def _block(self, w, x):
        rows, seq, _ = x.shape
        h = _norm(x, w["norm"][0])
        q, k, v = (
            (h @ w[name]).reshape(rows, seq, -1, self.head_dim) for name in "qkv"
        )
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.reshape(rows, seq, -1) @ w["o"]
        h = _norm(x, w["norm"][1])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def tokens(rows, seq=2048):
    """The like of a global batch."""
    return jax.ShapeDtypeStruct((rows, seq + 1), jnp.int32)


def _norm(x, scale):
    y = x.astype(jnp.float32)
    y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * jnp.broadcast_to(scale, x.shape)


def _piece(w, piece, x, labels):
    logits = (x @ w).astype(jnp.float32)
    label = labels - piece * w.shape[-1]
    inside = (label >= 0) & (label < w.shape[-1])
    picked = jnp.take_along_axis(logits, jnp.where(inside, label, 0)[..., None], -1)
    own = jnp.where(inside, picked[..., 0], 0.0)
    return piece + 1, (jax.nn.logsumexp(logits, -1), own)
