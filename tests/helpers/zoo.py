"""Small models of every kind, none of which knows that it will be sharded.

Widths are multiples of 8, so that 8 devices divide them; heads and layers are not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import fsdp_jax as fsdp
from fsdp_jax.sharding._model_def import describe

EMBED, MLP, HEADS, LAYERS, OUT = 16, 32, 2, 2, 8
ROWS, SEQ = 16, 5


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its units, and how to call it.

    Attributes:
      make: `make(dtype) -> make_model`.
      units: What `fully_shard` takes.
      apply: `apply(model, x) -> y` of shapes `[rows, seq, embed]`, `[rows, seq, out]`.
      zero_grads: Endings of parameters whose exact gradient is zero.
    """

    make: Callable[[Any], Callable[[jax.Array], Any]]
    units: tuple[Any, ...]
    apply: Callable[[Any, jax.Array], jax.Array]
    zero_grads: tuple[str, ...] = ()

    def plan(self, mesh, dtype=jnp.float32, **config) -> fsdp.Plan:
        return fsdp.fully_shard(
            self.make(dtype), mesh, self.units, fsdp.FSDPConfig(**config)
        )

    def weights(self, dtype=jnp.float32) -> tuple[Any, Any]:
        """(parameters, other state) of one device, made once for all tests."""
        return _weights(self, jnp.dtype(dtype))

    def sharded(self, plan: fsdp.Plan, dtype=jnp.float32) -> Any:
        """The same parameters in the like of `plan`."""
        params, _ = self.weights(dtype)
        return jax.tree.map(
            lambda leaf, like: jax.device_put(leaf.astype(like.dtype), like.sharding),
            params,
            plan.params,
        )

    def loss(self, model, batch):
        return jnp.mean((self.apply(model, batch["x"]) - batch["y"]) ** 2)


@functools.cache
def _weights(case: Case, dtype) -> tuple[Any, Any]:
    make = case.make(dtype)
    model = describe(make)
    params, state = jax.jit(lambda key: model.split(make(key)))(jax.random.key(1))
    return jax.device_get(params), state


def batch(dtype=np.float32, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Every row different, so that a rank that sees another's rows is found out."""
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(rows, SEQ, EMBED)).astype(dtype),
        "y": random.normal(size=(rows, SEQ, OUT)).astype(dtype),
    }


def attention(query, key, value, *_, **__):
    """Plain attention in the dtype of its inputs.

    flax's own does its softmax in float32, so that float64 runs would agree to no more
    than the seventh digit.
    """
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), value)


class Block(nnx.Module):
    def __init__(self, dtype, rngs: nnx.Rngs, dropout: float = 0.0):
        kw = {"rngs": rngs, "param_dtype": dtype, "dtype": None}
        self.norm = nnx.LayerNorm(EMBED, **kw)
        self.attend = nnx.MultiHeadAttention(
            HEADS, EMBED, decode=False, attention_fn=attention, **kw
        )
        self.up = nnx.Linear(EMBED, MLP, **kw)
        self.down = nnx.Linear(MLP, EMBED, **kw)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        x = x + self.attend(self.norm(x))
        return x + self.dropout(self.down(jnp.tanh(self.up(x))))


class Unrolled(nnx.Module):
    def __init__(self, dtype, rngs: nnx.Rngs, dropout: float = 0.0):
        self.layers = nnx.List([Block(dtype, rngs, dropout) for _ in range(LAYERS)])
        self.head = nnx.Linear(EMBED, OUT, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Scanned(nnx.Module):
    def __init__(
        self, dtype, rngs: nnx.Rngs, dropout: float = 0.0, layers: int = LAYERS
    ):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(dtype, rngs, dropout)

        self.layers = make(rngs)
        self.head = nnx.Linear(EMBED, OUT, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return layer(x)

        return self.head(run(self.layers, x))


class LinenBlock(linen.Module):
    dtype: Any

    @linen.compact
    def __call__(self, x, _=None):
        kw = {"param_dtype": self.dtype}
        attend = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention, **kw)
        x = x + attend(linen.LayerNorm(**kw)(x))
        hidden = jnp.tanh(linen.Dense(MLP, **kw)(x))
        return x + linen.Dense(EMBED, **kw)(hidden), None


class LinenModel(linen.Module):
    dtype: Any
    scanned: bool = False

    @linen.compact
    def __call__(self, x):
        if self.scanned:
            stack = linen.scan(
                LinenBlock,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=LAYERS,
            )
            x, _ = stack(self.dtype, name="layers")(x, None)
        else:
            for i in range(LAYERS):
                x, _ = LinenBlock(self.dtype, name=f"block_{i}")(x)
        return linen.Dense(OUT, param_dtype=self.dtype, name="head")(x)


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, dtype, key):
        up, down = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(EMBED, dtype=dtype)
        self.up = eqx.nn.Linear(EMBED, MLP, dtype=dtype, key=up)
        self.down = eqx.nn.Linear(MLP, EMBED, dtype=dtype, key=down)
        self.activation = jnp.tanh

    def __call__(self, x):
        def token(x):
            return x + self.down(self.activation(self.up(self.norm(x))))

        return jax.vmap(jax.vmap(token))(x)


class EquinoxModel(eqx.Module):
    """A stack that is scanned, then a list of layers."""

    stack: EquinoxBlock
    layers: list[EquinoxBlock]
    head: eqx.nn.Linear

    def __init__(self, dtype, key):
        first, second, last = jax.random.split(key, 3)
        self.stack = eqx.filter_vmap(lambda k: EquinoxBlock(dtype, k))(
            jax.random.split(first, LAYERS)
        )
        self.layers = [EquinoxBlock(dtype, k) for k in jax.random.split(second, 2)]
        self.head = eqx.nn.Linear(EMBED, OUT, dtype=dtype, key=last)

    def __call__(self, x):
        arrays, static = eqx.partition(self.stack, eqx.is_array)

        def body(x, layer):
            return eqx.combine(layer, static)(x), None

        x, _ = jax.lax.scan(body, x, arrays)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(jax.vmap(self.head))(x)


def _plain_weights(dtype, key, *lead):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (*lead, EMBED, MLP), dtype) * 0.2,
        "bias": jnp.zeros((*lead, MLP), dtype),
        "down": jax.random.normal(down, (*lead, MLP, EMBED), dtype) * 0.2,
    }


def _plain_make(dtype):
    def make(key):
        stack, single, head = jax.random.split(key, 3)
        return {
            "stack": _plain_weights(dtype, stack, LAYERS),
            "layers": [_plain_weights(dtype, k) for k in jax.random.split(single, 2)],
            "head": jax.random.normal(head, (EMBED, OUT), dtype),
        }

    return make


def _plain_layer(w, x, scale):
    return x + jnp.tanh(x @ w["up"] + w["bias"][None, None]) @ w["down"] * scale, None


def _plain_apply(params, x):
    scale = jnp.asarray(0.5, x.dtype)
    x, _ = fsdp.scan(_plain_layer, params["stack"], x, consts=(scale,))
    for weights in params["layers"]:
        x, _ = fsdp.unit(_plain_layer)(weights, x, scale)
    return x @ params["head"]


def _call(model, x):
    return model(x)


def _nnx(cls):
    return lambda dtype: lambda key: cls(dtype, nnx.Rngs(key))


def _linen(scanned):
    def make(dtype):
        module = LinenModel(dtype, scanned)
        return lambda key: module.init(key, jnp.zeros((1, SEQ, EMBED), dtype))

    def apply(variables, x):
        dtype = jax.tree.leaves(variables["params"]["head"])[0].dtype
        return LinenModel(dtype, scanned).apply(variables, x)

    return make, apply


# Softmax does not change when every score of a row moves by the same amount, which is
# all a key bias does: its exact gradient is zero, and what is computed is rounding.
KEY_BIAS = ("key.bias",)

CASES = {
    "nnx unrolled": Case(_nnx(Unrolled), (Block,), _call, KEY_BIAS),
    "nnx scanned": Case(_nnx(Scanned), (Block,), _call, KEY_BIAS),
    "linen": Case(_linen(False)[0], ("params.block_*",), _linen(False)[1], KEY_BIAS),
    "linen scanned": Case(
        _linen(True)[0], (fsdp.Stacked("params.layers"),), _linen(True)[1], KEY_BIAS
    ),
    "equinox": Case(
        lambda dtype: lambda key: EquinoxModel(dtype, key), (EquinoxBlock,), _call
    ),
    "plain pytree": Case(
        _plain_make, (fsdp.Stacked("stack"), "layers.*"), _plain_apply
    ),
}
