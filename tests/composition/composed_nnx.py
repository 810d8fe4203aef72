"""The model of a composition in flax.nnx."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from composition.composed_models import (
    Built,
    Tools,
    block_shapes,
    called,
    enter,
    in_float64,
    layer,
    leave,
    one_by_one,
    root_shapes,
    scan_options,
    table_of,
    trunk,
    twist,
    weights,
)
from composition.compositions import Composition
from composition.wraps import around_all, around_each
from flax import nnx


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
        self.table = nnx.Variable(table_of(case)) if case.buffer else None
        self.sows, norm = case.sow, None
        if case.sow != "sow":  # What is sown must not be an attribute already.
            self.balance = None
        if case.norm != "none":
            norm = nnx.BatchNorm(
                *(block_shapes(case)["bias"][0],),
                use_running_average=False,
                param_dtype=jnp.float64,
                rngs=nnx.Rngs(0),
            )
        self.norm = norm  # Once: nnx would take what was None before for static.

    def __call__(self, x, mask):
        def get(name):
            return getattr(self, name)[...]

        table = None if self.table is None else self.table[...]
        x, balance = layer(get, x, mask, self.norm, self.inner, table)
        if self.sows == "sow":
            self.sow(nnx.Intermediate, "balance", balance)
        elif self.sows == "attribute":
            self.balance = balance
        return x, jnp.zeros_like(balance)

    def take_balance(self):
        """Returns what a call left in an attribute, and takes it away."""
        balance, self.balance = self.balance, None
        return 0.0 if balance is None else balance


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
        if case.sharing == "linked":
            self.layers[1].up = self.layers[0].up
        has_shared = case.sharing in ("shared", "unused")
        self.shared = Block(case, shared) if has_shared else None


def nnx_model(case: Composition, tools: Tools, _) -> Built:
    def make(key):
        net = Net(case, key)
        nnx.update(net, in_float64(nnx.state(net)))
        return net

    def call_layers(net, x, masks):
        if case.layout == "unrolled":
            whole = net.embed[...]
            calls = [around_each(case, called(b), {}, whole) for b in net.layers]
            return one_by_one(calls, x, masks)
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

        x, balance = around_all(case, run, {}, get("embed"), enter(get, x), masks)
        sown = nnx.pop(net, nnx.Intermediate) if case.sow == "sow" else {}
        if case.sow == "attribute":
            blocks = [*net.layers, *([net.shared] if net.shared else [])]
            sown = [block.take_balance() for block in blocks]
        return leave(case, get, x), balance + sum(jax.tree.leaves(sown)), None

    units = (Block, Twist) if case.sharing == "nested" else (Block,)
    return Built(make, units, apply)
