"""The model of a composition in each framework, and its loss.

All are one computation: a layer is `x + tanh(norm(x @ up) + bias) * mask @ down`. What
is ours comes in as `Tools`, so that the same model runs in plain jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from composition.compositions import Composition
from composition.wraps import wrapped
from flax import linen, nnx

INPUTS, TOKENS, DROPPED = 3, 4, 0.3


@dataclasses.dataclass(frozen=True)
class Tools:
    """What runs layers: fsdp_jax's, or plain jax's.

    Attributes:
      unit: Marks a function of weights.
      scan: `scan(unit, stacked, carry, xs, **options)`.
    """

    unit: Callable[..., Any]
    scan: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Built:
    """A model that can be made, and called.

    Attributes:
      make: Takes a key.
      units: What `fully_shard` takes.
      apply: `apply(model, x, masks) -> (y, balance, new)`; `new` holds new values of
        arrays that are no parameters, None if they are in the model.
    """

    make: Callable[[Any], Any]
    units: tuple[Any, ...]
    apply: Callable[..., Any]


def normal(key, *shape):
    return jax.random.normal(key, shape, jnp.float64) / shape[0] ** 0.5


def block_shapes(case: Composition) -> dict[str, tuple[int, ...]]:
    """Parameters of one layer."""
    inner = case.width + (2 if case.axes["tp"] > 1 else 1)
    shapes = {"up": (case.width, inner), "bias": (inner,), "down": (inner, case.width)}
    if case.sharing == "nested":
        shapes["inner"] = (case.width, case.width)
    return shapes


def root_shapes(case: Composition) -> dict[str, tuple[int, ...]]:
    shapes = {"embed": (INPUTS, case.width)}
    if case.sharing != "tied":
        shapes["head"] = (case.width, INPUTS)
    return shapes


def weights(key, shapes):
    keys = jax.random.split(key, len(shapes))
    pairs = zip(shapes.items(), keys, strict=True)
    return {name: normal(k, *shape) for (name, shape), k in pairs}


def layer(get, x, mask, norm=None, inner=None):
    """One layer on rows, or on one row, and what it adds to the loss."""
    h = x @ get("up")
    h = h if norm is None else norm(h)
    h = jnp.tanh(h + get("bias").reshape((1,) * (x.ndim - 1) + (-1,)))
    x = x + (h * mask) @ get("down")
    x = x if inner is None else inner(x)
    return x, jnp.mean(x**2)


def twist(w, x):
    return x + 0.5 * jnp.tanh(x @ w)


def enter(get, x):
    return x @ get("embed")


def leave(case, get, x):
    return x @ (get("embed").T if case.sharing == "tied" else get("head"))


def trunk(case, call_layers, call_shared, x, masks):
    """The layers, and the one that is used between them again and again."""
    balance = jnp.zeros((), x.dtype)
    for _ in range(2 if case.sharing == "repeated" else 1):
        if case.sharing == "shared":
            x, more = call_shared(x, masks[0])
            balance = balance + more
        x, more = call_layers(x, masks)
        balance = balance + more
    if case.sharing == "shared":
        x, more = call_shared(x, masks[1])
        balance = balance + more
    return x, balance


def one_by_one(calls, x, masks):
    balance = jnp.zeros((), x.dtype)
    for call, mask in zip(calls, masks, strict=True):
        x, more = call(x, mask)
        balance = balance + more
    return x, balance


def scan_options(case):
    return {"prefetch": case.prefetch, "unroll": case.unroll}


# Plain trees of arrays


def plain(case: Composition, tools: Tools, stacked: Callable[..., Any]) -> Built:
    def make(key):
        root, layers, shared = jax.random.split(key, 3)
        each = [
            weights(k, block_shapes(case))
            for k in jax.random.split(layers, case.layers)
        ]
        tree = weights(root, root_shapes(case)) | {"layers": each}
        if case.layout != "unrolled":
            tree["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        if case.sharing == "shared":
            tree["shared"] = weights(shared, block_shapes(case))
        return tree

    def one(w, x, mask):
        inner = (lambda x: tools.unit(twist)(w["inner"], x)) if "inner" in w else None
        return layer(w.__getitem__, x, mask, inner=inner)

    def call_layers(layers, x, masks):
        if case.layout == "unrolled":
            return one_by_one(
                [lambda *a, w=w: tools.unit(one)(w, *a) for w in layers], x, masks
            )
        if case.layout == "fsdp":
            x, all_of = tools.scan(one, layers, x, (masks,), **scan_options(case))
        else:

            def body(x, slices):
                return tools.unit(one)(slices[0], x, slices[1])

            x, all_of = jax.lax.scan(body, x, (layers, masks))
        return x, all_of.sum(0)

    def run(w, x, masks):
        return trunk(
            *(case, lambda *a: call_layers(w["layers"], *a)),
            *(lambda *a: tools.unit(one)(w["shared"], *a), x, masks),
        )

    def apply(params, x, masks):
        own = {n: params[n] for n in ("layers", "shared") if n in params}
        x = enter(params.__getitem__, x)
        x, balance = wrapped(case, run, own, params["embed"], x, masks)
        return leave(case, params.__getitem__, x), balance, None

    units: tuple[Any, ...] = ("layers.*",)
    if case.layout != "unrolled":
        units = (stacked("layers"),)
    units += ("layers.*.inner",) if case.sharing == "nested" else ()
    units += ("shared",) if case.sharing == "shared" else ()
    return Built(make, units, apply)


# flax.nnx


class Twist(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)

    def __call__(self, x):
        return twist(self.w[...], x)


class Block(nnx.Module):
    def __init__(self, case, key):
        values = weights(key, block_shapes(case))
        self.inner = Twist(values.pop("inner")) if "inner" in values else None
        for name, value in values.items():
            setattr(self, name, nnx.Param(value))
        self.norm, self.sows = None, case.sow
        if case.norm:
            self.norm = nnx.BatchNorm(
                *(block_shapes(case)["bias"][0],),
                use_running_average=False,
                param_dtype=jnp.float64,
                rngs=nnx.Rngs(0),
            )

    def __call__(self, x, mask):
        def get(name):
            return getattr(self, name)[...]

        x, balance = layer(get, x, mask, self.norm, self.inner)
        if self.sows:
            self.sow(nnx.Intermediate, "balance", balance)
        return x, jnp.zeros_like(balance)


class Net(nnx.Module):
    def __init__(self, case, key):
        root, layers, shared = jax.random.split(key, 3)
        for name, value in weights(root, root_shapes(case)).items():
            setattr(self, name, nnx.Param(value))
        keys = jax.random.split(layers, case.layers)
        if case.layout == "unrolled":
            self.layers = nnx.List([Block(case, k) for k in keys])
        else:
            self.layers = nnx.vmap(lambda k: Block(case, k))(keys)
        self.shared = Block(case, shared) if case.sharing == "shared" else None


def nnx_model(case: Composition, tools: Tools, _) -> Built:
    def make(key):
        net = Net(case, key)
        nnx.update(net, in_float64(nnx.state(net)))
        return net

    def call_layers(net, x, masks):
        if case.layout == "unrolled":
            return one_by_one(net.layers, x, masks)
        if case.layout == "fsdp":
            x, all_of = tools.scan(
                *(lambda block, x, mask: block(x, mask), net.layers, x, (masks,)),
                **scan_options(case),
            )
            return x, all_of.sum(0)

        @nnx.scan(in_axes=(0, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def scanned(block, x, mask):
            return block(x, mask)

        x, all_of = scanned(net.layers, x, masks)
        return x, all_of.sum(0)

    def apply(net, x, masks):
        def run(_, x, masks):
            return trunk(case, lambda *a: call_layers(net, *a), net.shared, x, masks)

        def get(name):
            return getattr(net, name)[...]

        x, balance = wrapped(case, run, {}, get("embed"), enter(get, x), masks)
        sown = nnx.pop(net, nnx.Intermediate) if case.sow else {}
        return leave(case, get, x), balance + sum(jax.tree.leaves(sown)), None

    units = (Block, Twist) if case.sharing == "nested" else (Block,)
    return Built(make, units, apply)


def in_float64(tree):
    def wide(x):
        is_float = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.float64) if is_float else x

    return jax.tree.map(wide, tree)


# linen


def initializer(key, shape, dtype=jnp.float64):
    del dtype
    return normal(key, *shape)


class LinenTwist(linen.Module):
    @linen.compact
    def __call__(self, x):
        w = self.param("w", initializer, (x.shape[-1], x.shape[-1]))
        return twist(w, x)


class LinenBlock(linen.Module):
    case: Composition

    @linen.compact
    def __call__(self, x, mask):
        shapes = block_shapes(self.case)
        inner = LinenTwist(name="inner") if shapes.pop("inner", None) else None
        own = {n: self.param(n, initializer, shape) for n, shape in shapes.items()}
        norm = None
        if self.case.norm:
            norm = linen.BatchNorm(
                use_running_average=False, param_dtype=jnp.float64, name="norm"
            )
        x, balance = layer(own.__getitem__, x, mask, norm, inner)
        self.sow("losses", "balance", balance)
        return x, jnp.zeros_like(balance)


class LinenNet(linen.Module):
    case: Composition

    def setup(self):
        if self.case.layout == "unrolled":
            self.layers = [LinenBlock(self.case) for _ in range(self.case.layers)]
        else:
            axes = {"params": 0, "batch_stats": 0, "losses": 0}
            self.layers = linen.scan(
                *(LinenBlock, axes, {}, {"params": True}),
                in_axes=0,
                length=self.case.layers,
            )(self.case)
        if self.case.sharing == "shared":
            self.shared = LinenBlock(self.case)

    def __call__(self, x, masks):
        def call_layers(x, masks):
            if self.case.layout == "unrolled":
                return one_by_one(self.layers, x, masks)
            x, _ = self.layers(x, masks)
            return x, jnp.zeros((), x.dtype)

        shared = self.shared if self.case.sharing == "shared" else None
        return trunk(self.case, call_layers, shared, x, masks)[0]


def linen_model(case: Composition, tools: Tools, stacked: Callable[..., Any]) -> Built:
    del tools
    net = LinenNet(case)

    def make(key):
        root, inner = jax.random.split(key)
        x = jnp.ones((2, TOKENS, case.width))
        masks = jnp.ones((case.layers, 2, 1, block_shapes(case)["bias"][0]))
        variables = in_float64(net.init(inner, x, masks))
        kept = {n: variables[n] for n in ("params", "batch_stats") if n in variables}
        return {**kept, "root": {"params": weights(root, root_shapes(case))}}

    def apply(variables, x, masks):
        get = variables["root"]["params"].__getitem__
        own = {n: variables[n] for n in ("params", "batch_stats") if n in variables}

        def run(own, x, masks):
            mutable = ["losses"] * case.sow + ["batch_stats"] * case.norm
            y, new = net.apply(own, x, masks, mutable=mutable)
            sown = jax.tree.leaves(new.pop("losses", {}))
            return y, (sum(jnp.sum(s) for s in sown) + jnp.zeros((), x.dtype), new)

        out = wrapped(case, run, own, get("embed"), enter(get, x), masks)
        x, (balance, new) = out
        return leave(case, get, x), balance, new or None

    units: tuple[Any, ...] = ("params.layers_*",)
    if case.layout != "unrolled":
        units = (stacked("params.layers"),)
    units += ("params.layers_*.inner",) if case.sharing == "nested" else ()
    units += ("params.shared",) if case.sharing == "shared" else ()
    return Built(make, units, apply)
