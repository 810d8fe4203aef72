"""The user's loss as a function of shards, traced and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core
from jaxtyping import Array, Float

from fsdp_jax._scopes import unit_scope
from fsdp_jax._tree import PyTree
from fsdp_jax.sharding._batch_norm import sync_batch_norms, sync_linen_batch_norms
from fsdp_jax.sharding._mesh import DATA_AXES, axes_in_use
from fsdp_jax.sharding._plan import ROOT, Plan
from fsdp_jax.step._collectives import gather_weight
from fsdp_jax.step._constraints import without_foreign_constraints
from fsdp_jax.step._lifted_gathers import nested_stacks
from fsdp_jax.step._linen_units import gather_at_units, without_constraints
from fsdp_jax.step._linen_weights import says_which_weights
from fsdp_jax.step._loss_arguments import LossFn, takes_key
from fsdp_jax.step._loss_check import check_gradients, check_loss
from fsdp_jax.step._model_state import (
    UpdatedModel,
    fold_keys,
    put_updated,
    refuse_state,
    states_take_constants,
    written_state,
)
from fsdp_jax.step._module_units import (
    gather_unbound,
    mark_objects,
    unmark_objects,
)
from fsdp_jax.step._named_arrays import with_scannable_shards
from fsdp_jax.step._prefetched_scans import prefetch_scans
from fsdp_jax.step._shard import Shard
from fsdp_jax.step._split_loss import SplitLoss, split_loss
from fsdp_jax.step._unit_order import order_units

LossOfShards = Callable[..., Any]
"""`(shards, model_state, batch, key) -> (sum, (count, aux, model_state))`.

A loss that is a mean is returned as `sum` with a `count` of 1.
"""


@dataclasses.dataclass(frozen=True)
class LossForm:
    """The form of a loss function's result.

    Attributes:
      has_aux: Whether it is `(loss, aux)`.
      per_token: Whether `loss` in it is `(sum, count)`.
    """

    has_aux: bool = False
    per_token: bool = False

    def __post_init__(self) -> None:
        """Refuses what is no boolean, such as "no", which is true."""
        given = {"has_aux": self.has_aux, "calculate_per_token_loss": self.per_token}
        wrong = [
            f"{k}={v!r}" for k, v in given.items() if not isinstance(v, bool | np.bool_)
        ]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: True or False.")


def loss_of_shards(plan: Plan, loss_fn: LossFn, form: LossForm) -> LossOfShards:
    """Makes a function of a plan's shards from a loss of a model.

    It gathers the root parameters, merges the model from shards and state, marks its
    units, runs `loss_fn`, and reads the state that the loss left.

    Args:
      plan: Plan of the model.
      loss_fn: The user's loss.
      form: Form of its result.

    Returns:
      The loss, see `LossOfShards`.
    """
    wants_key = takes_key(loss_fn)
    data_axes = axes_in_use(plan.mesh, DATA_AXES)
    synced = data_axes if plan.config.sync_batch_norm else ()
    logged: set[str] = set()

    def call(shards: Sequence[Shard], model_state, batch, key):
        with unit_scope("root"):
            # Root parameters belong to no unit: gathered here, once for the loss.
            leaves = [
                gather_weight(s).weight if s.param.unit == ROOT else s for s in shards
            ]
        state = fold_keys(model_state, key)
        params = plan.treedef.unflatten(leaves)
        # Dropout of LoRA factors is for training, where shards have a `grad_buffer`.
        if plan.model.is_random and any(s.grad_buffer is not None for s in shards):
            model = plan.model.adapted.merge(params, state, key)
        else:
            model = plan.model.merge(params, state)
        if not isinstance(model, nnx.Module):
            model = with_scannable_shards(without_constraints(model))
        # On this copy of the model, which `merge` made; the user's stays as it is.
        model = sync_batch_norms(model, synced)
        model = mark_objects(model, plan.unit_classes)
        extra = {"key": key} if wants_key else {}
        with (
            gather_at_units(),
            gather_unbound(plan.unit_classes),
            without_foreign_constraints(logged),
            sync_linen_batch_norms(synced),
            states_take_constants(),
            says_which_weights(),
        ):
            out = loss_fn(model, batch, **extra)
        loss, aux = _loss_and_aux(out, form)
        total, count = _sum_and_count(loss) if form.per_token else (loss, 1)
        is_training = any(s.grad_buffer is not None for s in shards)
        model_state, aux = _written(plan, model, model_state, aux, is_training)
        total, count = _checked_loss(total), _checked_count(count)
        # In the dtype of the sum that it divides: float64 where the loss is.
        return total, (jnp.asarray(count, total.dtype), aux, model_state)

    return call


def _written(
    plan: Plan, model: Any, before: PyTree, aux: Any, is_training: bool
) -> tuple[PyTree, Any]:
    """Returns the model state that the loss left, and its aux without that state."""
    if isinstance(model, nnx.Module):
        if isinstance(aux, UpdatedModel):
            raise ValueError(
                f"loss_fn returned UpdatedModel(...) of a {type(model).__name__}, an "
                "nnx module, which already holds what was written to it. Return aux "
                "alone."
            )
        _, after = plan.model.split(model)
        return written_state(before, after), aux
    if isinstance(aux, UpdatedModel):
        return put_updated(plan, before, unmark_objects(aux.model)), aux.aux
    if is_training:
        refuse_state(plan, aux)
    return before, aux


def trace_loss(
    loss: LossOfShards,
    shards: Sequence[Shard],
    *args: PyTree,
    axes: Sequence[str] = (),
    prefetch: int = 0,
) -> tuple[LossOfShards, dict[str, int]]:
    """Traces a loss once, to check its use of shards and to run the trace.

    Args:
      loss: Loss of a `ShardedLoss`.
      shards: Shards of all parameters.
      *args: Model state, batch and key, concrete or abstract.
      axes: Mesh axes of more than one device.
      prefetch: Number of units that loops gather ahead, see `prefetch_scans`; 0 leaves
        loops as they are.

    Returns:
      The traced loss, and how often each unit's parameter is gathered, see
      `uses_of_shards`.

    Raises:
      ValueError: See `check_loss`.
    """
    closed, out_tree = _traced(loss, shards, *args)
    if nested := nested_stacks(closed.jaxpr):
        shards = [_in_loop(s) if s.param.unit in nested else s for s in shards]
        closed, out_tree = _traced(loss, shards, *args)
    gathers = check_loss(closed.jaxpr, shards, args, axes)
    if prefetch:
        closed = prefetch_scans(closed, shards, prefetch)
    if prefetch and all(shard.grad_buffer is None for shard in shards):
        # What is to be differentiated is ordered with its backward, see below.
        closed = order_units(closed, len(jax.tree.leaves(shards)), prefetch)
    return _function(closed, out_tree), gathers


def _in_loop(shard: Shard) -> Shard:
    """Returns a shard of a stack that a loop of the loss runs several times."""
    policy = dataclasses.replace(shard.param.unit_policy, is_nested=True)
    param = dataclasses.replace(shard.param, unit_policy=policy)
    return dataclasses.replace(shard, param=param)


def trace_and_split(
    loss: LossOfShards,
    shards: Sequence[Shard],
    *args: PyTree,
    axes: Sequence[str] = (),
) -> SplitLoss:
    """Traces and checks a loss, and splits it at the stack that stages share.

    Args:
      loss: Loss of a `ShardedLoss`.
      shards: Shards of all parameters; of the stack, those of one chunk.
      *args: Model state, batch and key, concrete or abstract.
      axes: Mesh axes of more than one device.

    Returns:
      The parts of the loss.

    Raises:
      ValueError: See `check_loss` and `split_loss`.
    """
    try:
        closed, out_tree = _traced(loss, shards, *args)
    except Exception as error:
        error.add_note(
            "Raised by loss_fn, in which a stack that pp splits has the layers of one "
            "stage: fsdp.scan(unit, stack, x), called once on the whole stack, runs "
            "all of them; no jax.lax.scan, nnx.scan or linen.scan of the model does."
        )
        raise
    check_loss(closed.jaxpr, shards, args, axes, is_split=True)
    return split_loss(closed, out_tree, len(jax.tree.leaves(shards)), args[0])


def gradients_of(loss: LossOfShards) -> Callable[..., Any]:
    """Makes `fn(shards, state, rows, key, scale) -> (grads, total, count, aux, state)`.

    The gradients are those of the loss times `scale`, as cotangents of the shards'
    `grad_buffer`s.
    """

    def gradients(shards, state, rows, key, scale):
        def of_grad_buffers(grad_buffers):
            given = [
                dataclasses.replace(shard, grad_buffer=grad_buffer)
                for shard, grad_buffer in zip(shards, grad_buffers, strict=True)
            ]
            return loss(given, state, rows, key)

        grad_buffers = [shard.grad_buffer for shard in shards]
        total, pull, (count, aux, after) = jax.vjp(
            of_grad_buffers, grad_buffers, has_aux=True
        )
        # The loss scale is the cotangent of the loss, so the loss itself is unscaled.
        (grads,) = pull(jnp.full_like(total, scale))
        return grads, total, count, aux, after

    return gradients


def trace_gradients(
    loss: LossOfShards,
    shards: Sequence[Shard],
    *args: PyTree,
    axes: Sequence[str] = (),
    prefetch: int = 0,
) -> tuple[Callable[..., Any], set[str]]:
    """Traces the gradients of a loss once, to check them and to run the trace.

    Args:
      loss: Loss returned by `trace_loss`.
      shards: Shards of all parameters.
      *args: State, rows, key and scale, the other arguments of `gradients_of`.
      axes: Mesh axes of more than one device.
      prefetch: Number of units gathered ahead of the one that computes, where units run
        one after the other, see `order_units`; 0 leaves their order to XLA.

    Returns:
      The traced function of `gradients_of`; and the names of parameters whose
      gradients leave their units exactly once, see `check_gradients`.

    Raises:
      ValueError: See `check_gradients`.
    """
    closed, out_tree = _traced(gradients_of(loss), shards, *args)
    once = check_gradients(closed.jaxpr, shards, args, axes)
    if prefetch:
        closed = order_units(closed, len(jax.tree.leaves(shards)), prefetch)
    return _function(closed, out_tree), once


def _traced(fn: Callable[..., Any], *args: PyTree) -> tuple[core.ClosedJaxpr, Any]:
    """Returns the trace of a function, and the structure of its result."""
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    return closed, jax.tree.structure(shape)


def _function(closed: core.ClosedJaxpr, out_tree: Any) -> Callable[..., Any]:
    def run(*args):
        leaves = core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return out_tree.unflatten(leaves)

    return run


def _has_update(out: Any) -> bool:
    return isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], UpdatedModel)


def _loss_and_aux(out: Any, form: LossForm) -> tuple[Any, Any]:
    if not form.has_aux and not _has_update(out):
        return out, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        shown = "array" if isinstance(out, jax.Array) else type(out).__name__
        raise ValueError(
            f"With has_aux=True loss_fn returns (loss, aux); it returned: {shown}. "
            "Leave has_aux out if there is no aux."
        )
    loss, aux = out
    return loss, aux


def _sum_and_count(loss: Any) -> tuple[Any, Any]:
    if not isinstance(loss, tuple) or len(loss) != 2:
        raise ValueError(
            "With calculate_per_token_loss=True loss_fn returns (sum, count), as in "
            "(losses.sum(), mask.sum()), or ((sum, count), aux) with has_aux=True; it "
            f"returned a {type(loss).__name__}."
        )
    return loss


def _checked_loss(loss: Any) -> Float[Array, ""]:
    if loss is None or isinstance(loss, tuple | list | dict):
        raise ValueError(_no_loss(type(loss).__name__))
    try:
        loss = jnp.asarray(loss)
    except TypeError as error:  # Of words and other objects.
        raise ValueError(_no_loss(type(loss).__name__)) from error
    if loss.ndim or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(_no_loss(f"{loss.dtype}{list(loss.shape)}"))
    # It is summed over microbatches and ranks, which would lose digits in bfloat16.
    return loss.astype(jnp.promote_types(loss.dtype, jnp.float32))


def _checked_count(count: Any) -> Array:
    try:
        array = jnp.asarray(count)
    except (TypeError, ValueError) as error:
        raise ValueError(_no_count(repr(count))) from error
    is_real = array.dtype == jnp.bool_ or jnp.issubdtype(array.dtype, jnp.integer)
    if array.ndim or not (is_real or jnp.issubdtype(array.dtype, jnp.floating)):
        raise ValueError(_no_count(f"{array.dtype}{list(array.shape)}"))
    return array


def _no_count(returned: str) -> str:
    return (
        f"loss_fn returned the count {returned}; it is one real number, that of the "
        "tokens in the sum. Return mask.sum()."
    )


def _no_loss(returned: str) -> str:
    return (
        f"loss_fn returned {returned}; a loss is one floating-point number, the mean "
        "over the rows it was given. Return the mean, or pass has_aux=True if it "
        "returns (loss, aux), calculate_per_token_loss=True if it returns (sum, count)."
    )
