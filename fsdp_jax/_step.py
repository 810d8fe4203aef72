"""One training step of a plan: gather, compute, reduce, update, in one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from fsdp_jax._batch import check_batch, place_batch
from fsdp_jax._local import LossFn, LossForm, global_grads, global_loss, takes_rng
from fsdp_jax._plan import Plan
from fsdp_jax._state import TrainState, abstract_state
from fsdp_jax._tree import PyTree, named_leaves


def value_and_grad(
    plan: Plan,
    loss_fn: LossFn,
    has_aux: bool = False,
    accumulate: int = 1,
    *,
    calculate_per_token_loss: bool = False,
) -> Callable[..., Any]:
    """The sharded `jax.value_and_grad`, for a training loop of one's own.

    Args:
      plan: From `fully_shard`.
      loss_fn: `loss_fn(model, batch) -> loss`, the mean over the rows of `batch`; it
        sees whole weights and this device's rows. If it has an argument `rng`, it gets
        a key of its own for each data rank and microbatch.
      has_aux: `loss_fn` returns `(loss, aux)`. Floating-point scalars of `aux` are
        averaged over ranks and microbatches, integer ones summed, and arrays are put
        together along their first dim, as rows of the batch.
      accumulate: Microbatches a call; gradients are their mean.
      calculate_per_token_loss: `loss_fn` returns `(sum, count)` in the place of the
        loss, which then is the sum of all sums over the sum of all counts, so that each
        token weighs the same however many its rank and microbatch have. Megatron's
        word; without it, each rank and microbatch weighs the same.

    Returns:
      `fn(params, batch, *, rng=None, model_state=None) -> ((loss, aux), grads)`; `aux`
      is None without `has_aux`. Gradients come in the mould `plan.grads`, the loss is
      the mean over the global batch. With `model_state`, which a model with dropout or
      BatchNorm needs, the result is `((loss, aux, model_state), grads)`. It is jitted.

    Raises:
      ValueError: From the call, if the batch does not divide into ranks and
        microbatches, or randomness is needed and no `rng` is given.
    """
    form = LossForm(has_aux, calculate_per_token_loss)
    compute = jax.jit(global_grads(plan, loss_fn, form, accumulate))
    needs_rng = takes_rng(loss_fn) or plan.has_keys

    def fn(params, batch, *, rng=None, model_state=None):
        _check_call(plan, needs_rng, rng, model_state)
        check_batch(plan, batch, accumulate)
        rng = jax.random.key(0) if rng is None else rng
        given = plan.model_state if model_state is None else model_state
        batch = place_batch(plan, batch)
        (loss, aux, new_state), grads = compute(params, batch, rng, given)
        value = (loss, aux) if model_state is None else (loss, aux, new_state)
        return value, grads

    return fn


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A compiled training step: `state, metrics = step(state, batch)`.

    Attributes:
      plan: What it was made for.
      accumulate: Microbatches a step.
      jitted: The `jax.jit` function of `(state, batch)`; the state is donated.
    """

    plan: Plan
    accumulate: int
    jitted: Any

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
        """Runs one step; the old state is given up to make room for the new one."""
        check_batch(self.plan, batch, self.accumulate)
        return self.jitted(state, place_batch(self.plan, batch))

    def lower(self, state: PyTree, batch: PyTree) -> jax.stages.Lowered:
        """Lowers the step for concrete or abstract arguments, to look at it."""
        check_batch(self.plan, batch, self.accumulate)
        sharding = self.plan.batch_sharding
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=sharding
            ),
            batch,
        )
        return self.jitted.lower(state, shapes)


def make_train_step(
    plan: Plan,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    accumulate: int = 1,
    calculate_per_token_loss: bool = False,
) -> TrainStep:
    """Makes the step that updates a `TrainState` with one batch.

    Args:
      plan: From `fully_shard`.
      loss_fn: As for `value_and_grad`.
      tx: The optimizer that made the state.
      has_aux: As for `value_and_grad`.
      accumulate: Microbatches a step; a step with k equals one with the whole batch.
      calculate_per_token_loss: As for `value_and_grad`.

    Returns:
      `step(state, batch) -> (state, metrics)`, where metrics hold `loss`, `grad_norm`
      (of the gradient before the optimizer sees it) and, with `has_aux`, `aux`.
    """
    form = LossForm(has_aux, calculate_per_token_loss)
    compute = global_grads(plan, loss_fn, form, accumulate)
    mould = abstract_state(plan, tx)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, mould)

    def step(state: TrainState, batch: PyTree):
        rng = jax.random.fold_in(state.rng, state.step)
        (loss, aux, model_state), grads = compute(
            state.params, batch, rng, state.model_state
        )
        with jax.named_scope("optimizer"):
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            # Moments keep the dtype they were made in, also where gradients are wider:
            # else the second step would be another program, and `load` would refuse.
            opt_state = jax.tree.map(
                lambda new, leaf: new.astype(leaf.dtype), opt_state, mould.opt_state
            )
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        if has_aux:
            metrics["aux"] = aux
        new = TrainState(state.step + 1, params, opt_state, model_state, state.rng)
        return new, metrics

    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    return TrainStep(plan, accumulate, jitted)


def make_eval_step(
    plan: Plan,
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    calculate_per_token_loss: bool = False,
) -> Callable[..., PyTree]:
    """Makes the step that only looks: no gradient, nothing updated.

    Args:
      plan: From `fully_shard`.
      loss_fn: As for `value_and_grad`; put the model in evaluation mode there.
      has_aux: As for `value_and_grad`.
      calculate_per_token_loss: As for `value_and_grad`.

    Returns:
      `evaluate(params, batch, *, rng=None, model_state=None) -> metrics` with `loss`
      and, with `has_aux`, `aux`.
    """
    form = LossForm(has_aux, calculate_per_token_loss)
    compute = jax.jit(global_loss(plan, loss_fn, form))
    needs_rng = takes_rng(loss_fn)

    def evaluate(params, batch, *, rng=None, model_state=None):
        _check_call(plan, needs_rng, rng, model_state)
        check_batch(plan, batch, 1)
        rng = jax.random.key(0) if rng is None else rng
        given = plan.model_state if model_state is None else model_state
        loss, aux = compute(params, place_batch(plan, batch), rng, given)
        return {"loss": loss, "aux": aux} if has_aux else {"loss": loss}

    return evaluate


def _check_call(plan: Plan, needs_rng: bool, rng: Any, model_state: Any) -> None:
    """Refuses a call that would leave a part of the model without a value."""
    missing = [name for name, _ in named_leaves(plan.model_state)]
    if model_state is None and missing:
        raise ValueError(
            f"The model has {len(missing)} array(s) that are no parameters: "
            f"{', '.join(missing[:5])}. Pass model_state=state.model_state, as made by "
            "fsdp_jax.init."
        )
    if needs_rng and rng is None:
        raise ValueError(
            "The loss or the model is random (dropout, or an argument `rng`). Pass "
            "rng=jax.random.key(...), a different one each call."
        )
