"""Evaluation and inference under a plan: no gradients, no update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax._tree import PyTree
from fsdp_jax.data._batch import check_batch, place_batch
from fsdp_jax.sharding._ambient_mesh import check_plan, own_mesh
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.step._loss import LossForm
from fsdp_jax.step._loss_arguments import LossFn, takes_key
from fsdp_jax.step._model_state import check_call
from fsdp_jax.training._call_check import ParamsWatch
from fsdp_jax.training._cpu_sync import settle
from fsdp_jax.training._gradients import global_loss
from fsdp_jax.training._stage_check import StageWatch


def make_eval_step(
    plan: Plan,
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    calculate_per_token_loss: bool = False,
) -> Callable[..., PyTree]:
    """Makes an evaluation step: computes the loss, without gradients or an update.

    Args:
      plan: Plan from `fully_shard`.
      loss_fn: Loss function, as in `value_and_grad`; put the model into evaluation mode
        inside it.
      has_aux: Whether `loss_fn` also returns `aux`, as in `value_and_grad`.
      calculate_per_token_loss: Whether `loss_fn` returns `(sum, count)`, as in
        `value_and_grad`.

    Returns:
      `evaluate(params, batch, *, key=None, model_state=None) -> metrics` with `loss`
      and, with `has_aux`, `aux`.

    Examples:
      >>> evaluate = fsdp.make_eval_step(plan, loss_fn)
      >>> list(evaluate(params, batch))
      ['loss']
    """
    check_plan(plan, "make_eval_step")
    form = LossForm(has_aux, calculate_per_token_loss)
    compute = jax.jit(global_loss(plan, loss_fn, form))
    needs_key = takes_key(loss_fn)
    watch, stages = ParamsWatch(plan), StageWatch(plan)

    def evaluate(params, batch, *, key=None, model_state=None):
        watch.look(params)
        check_call(plan, needs_key, key, model_state)
        check_batch(plan, batch, 1)
        key = jax.random.key(0) if key is None else key
        given = plan.model_state if model_state is None else model_state
        batch = place_batch(plan, batch)
        with own_mesh(plan.mesh):
            stages.look(compute, params, batch, key, given)
            loss, aux = settle(plan.mesh, compute(params, batch, key, given))
        return {"loss": loss, "aux": aux} if has_aux else {"loss": loss}

    return evaluate


def make_forward(plan: Plan, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Makes the sharded form of any function of the model: logits, samples, features.

    Weights are gathered unit by unit, as in training, so that a model that fits in
    training also fits in inference.

    Args:
      plan: Plan from `fully_shard`.
      fn: `fn(model, batch) -> outputs`; it sees unsharded weights and this device's
        rows of the batch. Arrays in `outputs` are rows again, in the order of the
        batch; floating-point scalars are averaged over ranks, integer ones summed, and
        booleans counted. If `fn` has an argument `key`, it gets a different key on each
        data rank. A loop over units whose trip count depends on the data must run
        equally often on all ranks, since all take part in each gather; it is refused
        unless the program shows that, see `fsdp_jax.ops.masked_count` and
        `fsdp_jax.step.assume_replicated`.

    Returns:
      `forward(params, batch, *, key=None, model_state=None) -> outputs`, jitted.

    Examples:
      >>> forward = fsdp.make_forward(plan, predict)
      >>> forward(params, batch).shape
      (8, 16)
    """
    check_plan(plan, "make_forward")
    takes_key(fn, "fn")  # Refuses what cannot be called.

    @functools.wraps(fn)
    def no_loss(model: Any, batch: PyTree, **key: Any) -> tuple[jax.Array, PyTree]:
        return jnp.zeros(()), fn(model, batch, **key)

    evaluate = make_eval_step(plan, no_loss, has_aux=True)

    def forward(params, batch, *, key=None, model_state=None):
        return evaluate(params, batch, key=key, model_state=model_state)["aux"]

    return forward
