"""A composition on a mesh, with fsdp_jax."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from composition.composed_loss import (
    BUILDERS,
    STEPS,
    Ran,
    is_frozen,
    loss_of,
    model_of,
    optimizer_of,
    rows_of,
    split,
)
from composition.composed_models import Built, Tools
from composition.compositions import PLACEMENTS, STRATEGIES, Composition

import fsdp_jax as fsdp


def run_sharded(case: Composition) -> Ran:
    """The case with fsdp_jax."""
    built = BUILDERS[case.framework](case, Tools(fsdp.unit, fsdp.scan), fsdp.Stacked)
    plan = plan_of(case, built)
    inner = loss_of(case, built)

    def loss(model, batch):
        value, aux, new = inner(model, batch)
        if new is not None:
            return value, fsdp.step.UpdatedModel(new, aux)
        return (value, aux) if case.aux else value

    options: dict[str, Any] = {
        "has_aux": case.aux and not (case.norm and case.framework != "nnx"),
        "num_microbatches": case.num_microbatches,
        "calculate_per_token_loss": case.per_token,
    }
    tx, batch = optimizer_of(case), rows_of(case)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    compute = fsdp.value_and_grad(plan, loss, **options)
    (first, aux, *_), grads = compute(
        state.params, batch, model_state=state.model_state
    )
    step = fsdp.make_train_step(plan, loss, tx, **options)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    aux = aux if case.aux else {}
    return Ran(
        *((first, aux), fsdp.unshard(grads), losses, fsdp.unshard(state.params)),
        state.model_state,
    )


def plan_of(case: Composition, built: Built) -> fsdp.Plan:
    count = math.prod(case.axes.values())
    mesh = fsdp.make_mesh(**case.axes, devices=jax.devices()[:count])
    shapes = jax.eval_shape(lambda: split(case, model_of(built))[0])
    names = [name for name, _ in fsdp.sharding.named_leaves(shapes)]
    options = dict(STRATEGIES[case.strategy])
    if case.strategy == "placed":
        options["placements"] = fsdp.Placements(*PLACEMENTS[case.placement])
    if case.axes["tp"] > 1:
        options["tensor_parallel"] = {n: 1 for n in names if n.split(".")[-1] == "up"}
    if case.axes["cp"] > 1:
        options["context_parallel"] = {"x": 1, "y": 1}
    if case.policy != "none":
        policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.dtype(case.policy))
        options["mp_policy"] = policy
    config = fsdp.FSDPConfig(
        reshard_after_forward=case.reshard,
        overlap_outer=case.overlap,
        frozen=tuple(n for n in names if is_frozen(case, n)),
        **options,
    )
    units = built.units if case.has_units else ()
    return fsdp.fully_shard(built.make, mesh, units, config)
