"""Two steps of a model, of which the second compiles nothing."""

from __future__ import annotations

from typing import Any

import jax
import optax
from helpers.compiles import compilations

import fsdp_jax as fsdp


def two_steps(
    plan: fsdp.Plan,
    loss: Any,
    tx: optax.GradientTransformation,
    batch: Any,
    **options: Any,
) -> tuple[Any, Any]:
    """Trains for two steps on one batch.

    Args:
        plan: Plan of the model.
        loss: `loss(model, batch)`.
        tx: Optimizer.
        batch: Global batch.
        **options: Of `make_train_step`.

    Returns:
        The second loss, and the parameters behind it, unsharded.
    """
    step = fsdp.make_train_step(plan, loss, tx, **options)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    state, _ = step(state, batch)
    with compilations() as heard:
        state, metrics = step(state, batch)
    assert not heard
    return metrics["loss"], fsdp.unshard(state.params)
