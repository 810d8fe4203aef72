"""Optimizers of compositions, on a mesh and on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from composition.compositions import Composition

import fsdp_jax as fsdp

MATRICES = ("up", "down")


def optimizer_of(case: Composition, plan: fsdp.Plan | None = None) -> Any:
    """Returns an optax optimizer; that of a plan may be made for it."""
    if case.optimizer == "layer_wise" and plan is not None:
        return _layer_wise(plan)
    return _OPTIMIZERS[case.optimizer]()


def is_matrix(name: str) -> bool:
    """Returns whether the parameter is a matrix of a layer."""
    return any(part in MATRICES for part in name.split("."))


def _of_matrices() -> optax.GradientTransformation:
    """Momentum of matrices that are divided by their norms, as wholes."""
    return optax.chain(optax.trace(0.9), _normed(), optax.scale(-0.02))


def _of_others() -> optax.GradientTransformation:
    return optax.adam(0.01, eps=1e-3)


def _normed() -> optax.GradientTransformation:
    def normed(matrix):
        norm = jnp.sqrt(jnp.sum(matrix**2, (-2, -1), keepdims=True))
        return matrix / (norm + 1e-3)

    return optax.stateless(lambda updates, _: jax.tree.map(normed, updates))


def _by_name() -> optax.GradientTransformation:
    """One optimizer for matrices and one for others, with states by name."""
    pair = _of_matrices(), _of_others()

    def parts(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        named = dict(fsdp.sharding.named_leaves(tree))
        matrices = {n: leaf for n, leaf in named.items() if is_matrix(n)}
        return matrices, {n: leaf for n, leaf in named.items() if n not in matrices}

    def init(params):
        return tuple(tx.init(p) for tx, p in zip(pair, parts(params), strict=True))

    def update(updates, state, params=None):
        given = zip(pair, parts(updates), state, parts(params), strict=True)
        done: list[Any] = [tx.update(*args) for tx, *args in given]
        named = {name: leaf for new, _ in done for name, leaf in new.items()}
        names = [name for name, _ in fsdp.sharding.named_leaves(updates)]
        leaves = [named[name] for name in names]
        new = jax.tree.structure(updates).unflatten(leaves)
        return new, tuple(state for _, state in done)

    return optax.GradientTransformation(init, update)


def _layer_wise(plan: fsdp.Plan) -> optax.GradientTransformation:
    names = [p.name for p in plan.param_plans if is_matrix(p.name) and not p.is_frozen]
    return fsdp.optim.layer_wise(plan, _of_matrices(), _of_others(), names)


def _plateau() -> optax.GradientTransformation:
    """Looks at the loss, of which no step is better than half of the best."""
    reduce = optax.contrib.reduce_on_plateau(factor=0.5, patience=0, rtol=0.5)
    return optax.chain(optax.sgd(0.1), reduce)


_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    # Large eps: what is zero but for rounding is not to be divided by its size.
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(0.01, eps=1e-3, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
    "plateau": _plateau,
    "by_name": _by_name,
    "layer_wise": _by_name,
}
