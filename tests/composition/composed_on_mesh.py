"""A composition on a mesh, with fsdp_jax."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from composition.composed_loss import (
    BUILDERS,
    STEPS,
    Ran,
    bound_key,
    is_frozen,
    loss_of,
    model_of,
    rows_of,
    split,
)
from composition.composed_models import Built, Tools
from composition.composed_optimizers import optimizer_of
from composition.compositions import PLACEMENTS, POLICIES, STRATEGIES, Composition

import fsdp_jax as fsdp


def run_sharded(case: Composition) -> Ran:
    """The case with fsdp_jax."""
    built = BUILDERS[case.framework](case, Tools(fsdp.unit, fsdp.scan), fsdp.Stacked)
    plan = plan_of(case, built)
    loss = loss_on_mesh(case, built)
    form: dict[str, Any] = {
        "has_aux": case.aux and not case.returns_state,
        "calculate_per_token_loss": case.per_token,
    }
    options = {**form, "num_microbatches": case.num_microbatches}
    tx, batch = optax.chain(_recorded(), optimizer_of(case, plan)), rows_of(case)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    aux, by_hand = {}, None
    if case.by_hand:
        compute = fsdp.value_and_grad(plan, loss, **options)
        # A key of the step, which takes no bound one's place.
        given = {"key": jax.random.key(1), "model_state": state.model_state}
        (_, shown, *_), by_hand = compute(state.params, batch, **given)
        aux = shown if case.aux else {}
    step = fsdp.make_train_step(plan, loss, tx, **options)
    losses, recorded, auxes = [], None, []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        auxes.append(metrics.get("aux", {}))
        if recorded is None:  # Copied, since the next step takes the arrays.
            recorded = jax.tree.map(np.array, fsdp.unshard(state.opt_state[0]))
    evaluated = None
    if case.evaluates:
        evaluate = fsdp.make_eval_step(plan, loss, **form)
        found = evaluate(state.params, batch, model_state=state.model_state)
        evaluated = found["loss"]
    return Ran(
        first=(losses[0], aux if case.returns_state else auxes[0]),
        grads=recorded.grads,
        grads_by_hand=fsdp.unshard(by_hand),
        losses=losses,
        params=fsdp.unshard(state.params),
        state=state.model_state,
        evaluated=evaluated,
    )


class _Recorded(NamedTuple):
    grads: Any


def _recorded() -> optax.GradientTransformation:
    """Keeps the gradients that it is given, which a step does not return."""

    def init(params):
        return _Recorded(jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        del state, params
        return updates, _Recorded(updates)

    return optax.GradientTransformation(init, update)


def loss_on_mesh(case: Composition, built: Built) -> Callable[..., Any]:
    """Returns the loss as a user writes it."""
    inner = loss_of(case, built)

    def with_key(model, batch, *, key):
        value, aux, new = inner(model, batch, key)
        if new is not None:
            return value, fsdp.step.UpdatedModel(new, aux)
        return (value, aux) if case.aux else value

    def loss(model, batch):
        return with_key(model, batch, key=bound_key())

    bound = functools.partial(with_key, key=bound_key())
    return bound if case.bound_key else loss


SPLIT_OVER_TP = {"up": 1}
"""Name of a weight -> its dim that tp splits, from the end if negative."""


def plan_of(
    case: Composition, built: Built, over_tp: Mapping[str, int] = SPLIT_OVER_TP
) -> fsdp.Plan:
    count = math.prod(case.axes.values())
    mesh = fsdp.make_mesh(**case.axes, devices=jax.devices()[:count])
    shapes = jax.eval_shape(lambda: split(case, model_of(built))[0])
    names = [name for name, _ in fsdp.sharding.named_leaves(shapes)]
    options = dict(STRATEGIES[case.strategy])
    if case.strategy == "placed":
        options["placements"] = fsdp.Placements(*PLACEMENTS[case.placement])
    if case.axes["tp"] > 1:
        options["tensor_parallel"] = {
            # A plan counts the dims of a unit, without those of its stack.
            name: over_tp[last] % (2 if case.has_units else leaf.ndim)
            for name, leaf in fsdp.sharding.named_leaves(shapes)
            if (last := name.split(".")[-1]) in over_tp
        }
    if case.axes["cp"] > 1:
        options["context_parallel"] = {"x": 1, "y": 1}
    if case.remat != "none":
        options["remat_policy"] = getattr(jax.checkpoint_policies, case.remat)
    config = fsdp.FSDPConfig(
        reshard_after_forward=case.reshard,
        overlap_outer=case.overlap,
        prefetch=case.unit_prefetch,
        frozen=tuple(n for n in names if is_frozen(case, n)),
        replicated=tuple(n for n in names if case.replicated in n.split(".")),
        min_shard_elements=case.min_shard_elements,
        sync_batch_norm=case.norm != "own",
        mp_policy=fsdp.MixedPrecisionPolicy(**POLICIES[case.policy]),
        pipeline=fsdp.PipelineConfig(case.schedule, case.virtual_stages),
        **options,
    )
    units = built.units if case.has_units else ()
    return fsdp.fully_shard(built.make, mesh, units, config)
