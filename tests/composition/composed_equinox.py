"""The model of a composition in equinox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from composition.composed_models import (
    Built,
    Tools,
    block_shapes,
    called,
    enter,
    layer,
    leave,
    one_by_one,
    root_shapes,
    scan_options,
    trunk,
    twist,
    weights,
)
from composition.compositions import Composition
from composition.wraps import around_all, around_each


class Twist(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return twist(self.w, x)


class Block(eqx.Module):
    own: dict[str, jax.Array]
    inner: Twist | None
    norm: eqx.nn.BatchNorm | None

    def __init__(self, case, key):
        own = weights(key, block_shapes(case))
        self.inner = Twist(own.pop("inner")) if "inner" in own else None
        self.own, self.norm = own, None
        if case.norm != "none":
            size = block_shapes(case)["bias"][0]
            self.norm = eqx.nn.BatchNorm(size, "rows", mode="batch")

    def __call__(self, x, mask, state=None):
        """With `state` of one row, under `vmap`; the new state is behind."""
        new = [state]

        def norm(h):
            assert self.norm is not None
            h, new[0] = self.norm(h.T, state)
            return h.T

        used = norm if self.norm is not None else None
        x, balance = layer(self.own.__getitem__, x, mask, used, self.inner)
        return (x, balance) if state is None else (x, balance, new[0])


class Net(eqx.Module):
    root: dict[str, jax.Array]
    layers: Any
    shared: Block | None

    def __init__(self, case, key):
        root, layers, shared = jax.random.split(key, 3)
        self.root = weights(root, root_shapes(case))
        keys = jax.random.split(layers, case.layers)
        if case.layout == "unrolled":
            self.layers = [Block(case, k) for k in keys]
        else:
            self.layers = eqx.filter_vmap(lambda k: Block(case, k))(keys)
        has_shared = case.sharing in ("shared", "unused")
        self.shared = Block(case, shared) if has_shared else None


def equinox_model(case: Composition, tools: Tools, _: Callable[..., Any]) -> Built:
    has_state = case.norm != "none"

    def make(key):
        return eqx.nn.make_with_state(Net)(case, key) if has_state else Net(case, key)

    def call_layers(net, x, masks):
        if case.layout == "unrolled":
            whole = net.root["embed"]
            calls = [around_each(case, called(b), {}, whole) for b in net.layers]
            return one_by_one(calls, x, masks)
        if case.layout == "fsdp":
            x, all_of = tools.scan(
                *(lambda block, x, mask: block(x, mask), net.layers, x, (masks,)),
                **scan_options(case),
            )
            return x, all_of.sum(0)

        def body(x, slices):
            return slices[0](x, slices[1])

        x, all_of = jax.lax.scan(body, x, (net.layers, masks))
        return x, all_of.sum(0)

    def apply(model, x, masks):
        net, state = model if has_state else (model, None)
        get = net.root.__getitem__

        def run(_, x, masks):
            return trunk(case, lambda *a: call_layers(net, *a), net.shared, x, masks)

        x = enter(get, x)
        if has_state:
            x, balance, state = with_state(case, net, x, masks, state)
            return leave(case, get, x), balance, (net, state)
        x, balance = around_all(case, run, {}, get("embed"), x, masks)
        return leave(case, get, x), balance, None

    units = (Block, Twist) if case.sharing == "nested" else (Block,)
    return Built(make, units, apply)


def with_state(case, net, x, masks, state):
    """The layers with BatchNorm, which sees one row of those that `vmap` maps over."""

    def of_row(x, masks, state):
        held = [state]

        def stateful(block):
            def call(x, mask):
                x, balance, held[0] = block(x, mask, held[0])
                return x, balance

            return call

        calls = [stateful(block) for block in net.layers]
        shared = None if net.shared is None else stateful(net.shared)
        x, balance = trunk(case, lambda *a: one_by_one(calls, *a), shared, x, masks)
        return x, balance, held[0]

    axes = {"in_axes": (0, 1, None), "out_axes": (0, 0, None), "axis_name": "rows"}
    x, balance, state = jax.vmap(of_row, **axes)(x, masks, state)
    return x, jnp.mean(balance), state
