"""The loss of a composition, its batch, and what a run of it gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from composition.composed_equinox import equinox_model
from composition.composed_models import (
    DROPPED,
    INPUTS,
    TOKENS,
    Built,
    block_shapes,
    linen_model,
    nnx_model,
    plain,
)
from composition.compositions import Composition
from flax import nnx

STEPS, SOWN = 3, 0.1

BUILDERS: dict[str, Callable[..., Built]] = {
    "plain": plain,
    "nnx": nnx_model,
    "linen": linen_model,
    "equinox": equinox_model,
}


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a run gives: names of results to trees of arrays."""

    first: Any
    grads: Any
    losses: Any
    params: Any
    state: Any


def rows_of(case: Composition) -> dict[str, np.ndarray]:
    """The batch: no two rows alike, and the ranks' differ in size."""
    rows = case.ranks * case.num_microbatches * case.rows_a_rank
    random, shape = np.random.default_rng(0), (rows, TOKENS, INPUTS)
    size = np.linspace(0.5, 2, rows)[:, None, None]
    return {
        "x": random.normal(size=shape) * size,
        "y": random.normal(size=shape),
        "row": np.arange(rows),
        "weight": np.arange(rows) % 3 + 1.0,
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
    """`loss(model, batch) -> (loss or (sum, count), aux, new)`."""

    def loss(model, batch):
        masks = masks_of(case, batch["row"])
        y, balance, new = built.apply(model, batch["x"], masks)
        errors = (y - batch["y"]) ** 2
        value = jnp.mean(errors) + SOWN * case.sow * balance
        if case.per_token:
            weight = jnp.broadcast_to(batch["weight"][:, None, None], errors.shape)
            value = (jnp.sum(errors * weight), jnp.sum(weight))
        return value, _aux(case, y), new

    return loss


def _aux(case: Composition, y: jax.Array) -> Any:
    if not case.aux:
        return {}
    rows = {} if case.axes["cp"] > 1 else {"rows": jnp.mean(y, (1, 2))}
    return {
        **rows,
        "size": jnp.mean(y**2),
        "tokens": jnp.int32(y.shape[0] * y.shape[1]),
    }


def optimizer_of(case: Composition) -> optax.GradientTransformation:
    return {
        # Large eps: what is zero but for rounding is not to be divided by its size.
        "sgd": lambda: optax.sgd(0.1, momentum=0.9),
        "adamw": lambda: optax.adamw(0.01, eps=1e-3, weight_decay=0.1),
        "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
        "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
    }[case.optimizer]()


def is_frozen(case: Composition, name: str) -> bool:
    return case.frozen in name


def model_of(built: Built) -> Any:
    return built.make(jax.random.key(0))


def split(case: Composition, model: Any) -> tuple[Any, Any]:
    """(parameters, other arrays) of a model."""
    if case.framework == "nnx":
        return nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
    if case.framework == "linen":
        params = {n: model[n] for n in ("params", "root") if n in model}
        return params, {n: model[n] for n in ("batch_stats",) if n in model}
    if case.framework == "equinox" and case.norm:
        return (eqx.filter(model[0], eqx.is_inexact_array), None), model[1]
    if case.framework == "equinox":
        return eqx.filter(model, eqx.is_inexact_array), {}
    return model, {}


def merge(case: Composition, model: Any, params: Any, state: Any) -> Any:
    if case.framework == "nnx":
        return nnx.merge(nnx.graphdef(model), params, state)
    if case.framework == "linen":
        return {**params, **state}
    if case.framework == "equinox" and case.norm:
        return eqx.combine(params[0], model[0]), state
    return eqx.combine(params, model)
