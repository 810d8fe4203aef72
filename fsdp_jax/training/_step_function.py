"""The function of a state and a batch that a training step compiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fsdp_jax._scopes import OPTIMIZER
from fsdp_jax._tree import PyTree
from fsdp_jax.sharding._offload import on_device
from fsdp_jax.sharding._padded import unpack
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._loss_scale import LossScale
from fsdp_jax.training._state import TrainState
from fsdp_jax.training._trainable import put_frozen, trainable
from fsdp_jax.training._update import in_dtypes_of, to_stored, unless


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of `make_train_step` on which the program of a step depends.

    Attributes:
      has_aux: Whether the loss returns `(loss, aux)`.
      update_model_state: Function that changes the model after the microbatches.
      may_skip: Whether a step with gradients that are not finite changes nothing.
      with_peaks: Whether the metrics have the largest magnitude of each gradient.
      loss_scale: Dynamic loss scale; None without one.
    """

    has_aux: bool
    update_model_state: Callable[[Any], Any] | None
    may_skip: bool
    with_peaks: bool
    loss_scale: LossScale | None


def step_function(
    plan: Plan,
    compute: Callable[..., Any],
    update: Callable[..., Any],
    abstract: TrainState,
    options: StepOptions,
) -> Callable[[TrainState, PyTree], tuple[TrainState, PyTree]]:
    """Makes `step(state, batch) -> (state, metrics)`, to be jitted.

    Args:
      plan: Plan of the step.
      compute: Function from `global_grads`.
      update: Function from `make_update`.
      abstract: Abstract state.
      options: Options of the step.
    """

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
        # `state.key` is constant over a run: each step folds in its own number.
        key = jax.random.fold_in(state.key, state.step)
        scale = state.loss_scale
        ((loss, aux), model_state, peaks), grads = compute(
            state.params, batch, key, state.model_state, scale and scale.scale
        )
        # Decided on the device: the host need not wait for the step to skip it.
        skip = ~jnp.isfinite(peaks).all() if options.may_skip else jnp.array(False)
        params = state.params
        if options.update_model_state:
            given = unpack(on_device(params) if plan.config.offload else params)
            plain, model_state = _updated(
                plan, options.update_model_state, given, model_state
            )
            plain = unless(skip, given, plain) if options.may_skip else plain
            params = to_stored(plan, abstract, plain)
        with jax.named_scope(OPTIMIZER):
            # Distinct from the keys of data ranks, which fold in their index, counted
            # from 0.
            of_update = jax.random.fold_in(key, 2**31 - 1)
            params, opt_state = update(
                params, state.opt_state, grads, skip, of_update, loss
            )
        if options.may_skip:
            model_state = unless(skip, state.model_state, model_state)
        rule = options.loss_scale
        new = TrainState(
            state.step + 1,
            params,
            opt_state,
            model_state,
            state.key,
            state.num_skipped + skip,
            rule.update(scale, ~skip) if rule and scale else None,
        )
        return new, _metrics(plan, options, state, (loss, aux, peaks), grads)

    return step


def _metrics(
    plan: Plan,
    options: StepOptions,
    state: TrainState,
    computed: tuple[Any, Any, Any],
    grads: PyTree,
) -> dict[str, Any]:
    loss, aux, peaks = computed
    metrics = {
        "loss": loss,
        # With their padding of zeros: without it, layers that are padded to a multiple
        # of the stages would be sent from stage to stage.
        "grad_norm": optax.tree.norm(trainable(plan, grads)),
    }
    if state.loss_scale is not None:
        metrics["loss_scale"] = state.loss_scale.scale
    if options.has_aux:
        metrics["aux"] = aux
    if options.with_peaks:
        metrics["grad_peaks"] = peaks
    return metrics


def _updated(
    plan: Plan, update: Callable[[Any], Any], params: PyTree, model_state: PyTree
) -> tuple[PyTree, PyTree]:
    """Returns parameters and model state after `update` has modified the model.

    Only frozen parameters change: those that are trained keep their values.
    """
    model = plan.model.merge(params, model_state)
    changed = update(model)
    new, after = plan.model.split(model if changed is None else changed)
    if jax.tree.structure(after) != jax.tree.structure(model_state):
        raise ValueError(
            "update_model_state left the model with other arrays than it had. Change "
            "the values of its variables, and neither add nor remove any."
        )
    params = put_frozen(plan, params, in_dtypes_of(params, new))
    return params, in_dtypes_of(plan.model_state, after)
