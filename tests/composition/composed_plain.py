"""The model of a composition as a tree of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from composition.composed_models import (
    Built,
    Tools,
    block_shapes,
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


def plain_model(case: Composition, tools: Tools, stacked: Callable[..., Any]) -> Built:
    def make(key):
        root, layers, shared = jax.random.split(key, 3)
        each = [
            weights(k, block_shapes(case))
            for k in jax.random.split(layers, case.layers)
        ]
        tree = weights(root, root_shapes(case)) | {"layers": each}
        if case.layout != "unrolled":
            tree["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        if case.sharing in ("shared", "unused"):
            tree["shared"] = weights(shared, block_shapes(case))
        return tree

    def one(w, x, mask):
        inner = (lambda x: tools.unit(twist)(w["inner"], x)) if "inner" in w else None
        return layer(w.__getitem__, x, mask, inner=inner)

    def closing_over(scale):
        def scaled(w, x, mask):
            x, more = one(w, x * scale, mask)
            return x, more * scale

        return tools.unit(scaled if case.closes_over else one)

    def call_layers(layers, unit, whole, x, masks):
        if case.layout == "unrolled":
            calls = [around_each(case, unit, w, whole) for w in layers]
            return one_by_one(calls, x, masks)
        if case.layout == "fsdp":
            x, all_of = tools.scan(one, layers, x, (masks,), **scan_options(case))
        else:

            def body(x, slices):
                return unit(slices[0], x, slices[1])

            x, all_of = jax.lax.scan(body, x, (layers, masks))
        return x, all_of.sum(0)

    def apply(params, x, masks):
        own = {n: params[n] for n in ("layers", "shared") if n in params}
        whole = params["embed"]
        unit = closing_over(1 + jnp.mean(whole) ** 2)

        def run(w, x, masks):
            return trunk(
                *(case, lambda *a: call_layers(w["layers"], unit, whole, *a)),
                *(lambda *a: unit(w["shared"], *a), x, masks),
            )

        x = enter(params.__getitem__, x)
        x, balance = around_all(case, run, misused(case, own), whole, x, masks)
        return leave(case, params.__getitem__, x), balance, None

    units: tuple[Any, ...] = ("layers.*",)
    if case.layout != "unrolled":
        units = (stacked("layers"),)
    units += ("layers.*.inner",) if case.sharing == "nested" else ()
    units += ("shared",) if case.sharing in ("shared", "unused") else ()
    return Built(make, units, apply)


def misused(case, own):
    """The weights of units, changed outside of them, which a plan refuses."""
    change = {
        "flip": lambda w: jnp.flip(w, -1),
        "cast": lambda w: w.astype(jnp.float32),
    }.get(case.misuse)
    return jax.tree.map(change, own) if change else own
