"""The model of a composition in flax.linen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from composition.composed_models import (
    TOKENS,
    Built,
    Tools,
    block_shapes,
    drawn,
    enter,
    in_float64,
    layer,
    leave,
    one_by_one,
    root_shapes,
    table_of,
    trunk,
    twist,
    weights,
)
from composition.compositions import Composition
from composition.wraps import around_all
from flax import linen

KEPT = ("params", "batch_stats", "constants")
"""Collections that the model keeps from step to step."""


def initializer(key, shape, dtype=jnp.float64):
    del dtype
    return drawn(key, *shape)


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
        norm, table = None, None
        if self.case.buffer:
            table = self.variable("constants", "table", table_of, self.case).value
        if self.case.norm != "none":
            norm = linen.BatchNorm(
                use_running_average=False, param_dtype=jnp.float64, name="norm"
            )
        x, balance = layer(own.__getitem__, x, mask, norm, inner, table)
        self.sow("losses", "balance", balance)
        return x, jnp.zeros_like(balance)


class LinenNet(linen.Module):
    case: Composition

    def setup(self):
        if self.case.layout == "unrolled":
            self.layers = [LinenBlock(self.case) for _ in range(self.case.layers)]
        else:
            axes = dict.fromkeys((*KEPT, "losses"), 0)
            self.layers = linen.scan(
                LinenBlock,
                variable_axes=axes,
                split_rngs={"params": True},
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
    net, is_normed = LinenNet(case), case.norm != "none"

    def make(key):
        root, inner = jax.random.split(key)
        x = jnp.ones((2, TOKENS, case.width))
        masks = jnp.ones((case.layers, 2, 1, block_shapes(case)["bias"][0]))
        variables = in_float64(net.init(inner, x, masks))
        kept = {n: variables[n] for n in KEPT if n in variables}
        return {"net": kept, "root": weights(root, root_shapes(case))}

    def apply(variables, x, masks):
        get = variables["root"].__getitem__
        own = variables["net"]

        def run(own, x, masks):
            mutable = ["losses"] * (case.sow != "none") + ["batch_stats"] * is_normed
            y, new = net.apply(own, x, masks, mutable=mutable)
            sown = jax.tree.leaves(new.pop("losses", {}))
            return y, (sum(jnp.sum(s) for s in sown) + jnp.zeros((), x.dtype), new)

        out = around_all(case, run, own, get("embed"), enter(get, x), masks)
        x, (balance, new) = out
        return leave(case, get, x), balance, {"net": new} if new else None

    units: tuple[Any, ...] = ("net.params.layers_*",)
    if case.layout != "unrolled":
        units = (stacked("net.params.layers"),)
    units += ("net.params.layers_*.inner",) if case.sharing == "nested" else ()
    units += ("net.params.shared",) if case.sharing == "shared" else ()
    return Built(make, units, apply)
