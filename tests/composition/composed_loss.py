"""The loss of a composition, its batch, and what a run of it gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from composition.composed_equinox import equinox_model
from composition.composed_linen import linen_model
from composition.composed_models import DROPPED, INPUTS, TOKENS, Built, block_shapes
from composition.composed_nnx import nnx_model
from composition.composed_plain import plain_model
from composition.compositions import Composition
from flax import nnx

STEPS, SOWN = 3, 0.1

BUILDERS: dict[str, Callable[..., Built]] = {
    "plain": plain_model,
    "nnx": nnx_model,
    "linen": linen_model,
    "equinox": equinox_model,
}


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a run gives: names of results to trees of arrays."""

    first: Any
    grads: Any
    grads_by_hand: Any
    losses: Any
    params: Any
    state: Any
    evaluated: Any


def bound_key() -> jax.Array:
    """Returns the key that is bound to a loss."""
    return jax.random.key(7)


def rows_of(case: Composition) -> dict[str, np.ndarray]:
    """The batch: no two rows alike, and the ranks' differ in size."""
    rows = case.ranks * case.num_microbatches * case.rows_a_rank
    random, shape = np.random.default_rng(0), (rows, TOKENS, INPUTS)
    size = np.linspace(0.5, 2, rows)[:, None, None]
    return {
        "x": random.normal(size=shape) * size,
        "y": random.normal(size=shape),
        "row": np.arange(rows),
        # No float32 holds them, nor their sums over any tokens here: a count in it is
        # seen.
        "weight": (np.arange(rows) % 3 + 1) / 7,
    }


def masks_of(case: Composition, row: jax.Array) -> jax.Array:
    shape = (case.layers, 1, block_shapes(case)["bias"][0])
    if not case.dropout:
        return jnp.ones((case.layers, row.shape[0], *shape[1:]))

    def mask(row):
        key = jax.random.fold_in(jax.random.key(5), row)
        return jax.random.bernoulli(key, 1 - DROPPED, shape) / (1 - DROPPED)

    return jax.vmap(mask, out_axes=1)(row)


def loss_of(case: Composition, built: Built) -> Callable[..., Any]:
    """`loss(model, batch, key) -> (loss or (sum, count), aux, new)`."""

    def loss(model, batch, key):
        masks = masks_of(case, batch["row"])
        y, balance, new = built.apply(model, batch["x"], masks)
        errors = (y - batch["y"]) ** 2
        if case.bound_key:
            errors = errors * (1 + jax.random.uniform(key, (), errors.dtype))
        value = jnp.mean(errors) + SOWN * (case.sow != "none") * balance
        value = value + _penalty(case, model)
        if case.per_token:
            weight = jnp.broadcast_to(batch["weight"][:, None, None], errors.shape)
            value = (jnp.sum(errors * weight), jnp.sum(weight))
        return value, _aux(case, y), new

    def differentiated(model, batch, key):
        value, aux, new = loss(model, batch, key)
        grads = jax.grad(lambda model: _first(loss(model, batch, key)[0]))(model)
        return jax.tree.map(lambda v: v + 0.01 * _squares(grads), value), aux, new

    return differentiated if case.misuse == "inner" else loss


def _penalty(case: Composition, model: Any) -> Any:
    return 0.01 * _squares(model["layers"]) if case.misuse == "penalty" else 0.0


def _squares(tree: Any) -> Any:
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _aux(case: Composition, y: jax.Array) -> Any:
    if not case.aux:
        return {}
    rows = {} if case.axes["cp"] > 1 else {"rows": jnp.mean(y, (1, 2))}
    return {
        **rows,
        "size": jnp.mean(y**2),
        "tokens": jnp.int32(y.shape[0] * y.shape[1]),
    }


def is_frozen(case: Composition, name: str) -> bool:
    return case.frozen in name


def model_of(built: Built) -> Any:
    return built.make(jax.random.key(0))


def split(case: Composition, model: Any) -> tuple[Any, Any]:
    """(parameters, other arrays) of a model."""
    if case.framework == "nnx":
        return nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
    if case.framework == "linen":
        net = model["net"]
        params = {"net": {"params": net["params"]}} if "params" in net else {}
        state = {n: net[n] for n in ("batch_stats", "constants") if n in net}
        root = {"root": model["root"]} if "root" in model else {}
        return {**params, **root}, {"net": state}
    if case.framework == "equinox" and case.norm != "none":
        return (eqx.filter(model[0], eqx.is_inexact_array), None), model[1]
    if case.framework == "equinox":
        return eqx.filter(model, eqx.is_inexact_array), {}
    return model, {}


def merge(case: Composition, model: Any, params: Any, state: Any) -> Any:
    """The parts of `split` as a model again, with what is no array of `model`."""
    if case.framework == "nnx":
        return nnx.merge(nnx.graphdef(model), params, state, copy=True)
    if case.framework == "linen":
        return {**params, "net": {**params["net"], **state["net"]}}
    if case.framework == "equinox" and case.norm != "none":
        return eqx.combine(params[0], model[0]), state
    return params if model is None else eqx.combine(params, model)
