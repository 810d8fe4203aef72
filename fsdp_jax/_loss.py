"""The user's loss as a function of shards, and what it does with them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core
from jaxtyping import Array, Float

from fsdp_jax._collectives import gather_weight
from fsdp_jax._cut import CutLoss, cut_loss
from fsdp_jax._linen import gather_at_units
from fsdp_jax._model_state import fold_keys, written_state
from fsdp_jax._objects import mark_objects
from fsdp_jax._plan import ROOT, Plan
from fsdp_jax._shard import Shard
from fsdp_jax._tree import PyTree
from fsdp_jax._uses import uses_of_shards

LossFn = Callable[..., Any]
"""`loss_fn(model, batch)`, with `rng=key` if it asks, to a loss or `(loss, aux)`."""

LossOfShards = Callable[..., Any]
"""`(shards, model_state, batch, rng) -> (sum, (count, aux, model_state))`.

A loss that is a mean is the sum of one.
"""


@dataclasses.dataclass(frozen=True)
class LossForm:
    """What a loss function returns.

    Attributes:
      has_aux: It returns `(loss, aux)`.
      per_token: In the place of the loss it returns `(sum, count)`.
    """

    has_aux: bool = False
    per_token: bool = False


def takes_rng(loss_fn: LossFn) -> bool:
    """Whether the loss asks for a key, by an argument named `rng` that is not bound."""
    return "rng" in inspect.signature(loss_fn).parameters and not _binds_rng(loss_fn)


def _binds_rng(fn: Any) -> bool:
    """Whether a partial, here or inside of wrappers, has given the argument a value."""
    if isinstance(fn, functools.partial):
        return "rng" in fn.keywords or _binds_rng(fn.func)
    inner = getattr(fn, "__wrapped__", None)
    return inner is not None and _binds_rng(inner)


def loss_of_shards(plan: Plan, loss_fn: LossFn, form: LossForm) -> LossOfShards:
    """Makes the loss that is handed the shards of a plan instead of a model."""
    wants_rng = takes_rng(loss_fn)

    def call(shards: Sequence[Shard], model_state, batch, rng):
        with jax.named_scope("unit:root"):
            leaves = [gather_weight(s) if s.row.unit == ROOT else s for s in shards]
        state = fold_keys(model_state, rng)
        params = plan.treedef.unflatten(leaves)
        if plan.model.is_random and any(s.sink is not None for s in shards):
            model = plan.model.adapted.merge(params, state, rng)
        else:
            model = plan.model.merge(params, state)
        model = mark_objects(model, plan.unit_classes)
        extra = {"rng": rng} if wants_rng else {}
        with gather_at_units(plan.units):
            out = loss_fn(model, batch, **extra)
        loss, aux = out if form.has_aux else (out, None)
        total, count = _sum_and_count(loss) if form.per_token else (loss, 1)
        if isinstance(model, nnx.Module):
            _, after = plan.model.split(model)
            model_state = written_state(model_state, after)
        total = _checked_loss(total)
        # As exact as the sum that it divides: float64 where the loss is.
        return total, (jnp.asarray(count, total.dtype), aux, model_state)

    return call


def trace_loss(
    loss: LossOfShards, shards: Sequence[Shard], *args: PyTree
) -> tuple[LossOfShards, dict[str, int]]:
    """Traces a loss once, to run it and to see what it does with the shards of units.

    Args:
      loss: From `loss_of_shards`.
      shards: Of all parameters.
      *args: Model state, batch and key, or their shapes.

    Returns:
      The loss as traced, and how often each unit's parameter is gathered, see
      `uses_of_shards`.

    Raises:
      ValueError: If it computes with a shard as if it were the weight; all offenders.
    """
    closed, out_tree, gathers = _traced(loss, shards, *args)

    def run(*args):
        leaves = core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return out_tree.unflatten(leaves)

    return run, gathers


def trace_and_cut(
    loss: LossOfShards, shards: Sequence[Shard], *args: PyTree
) -> CutLoss:
    """As `trace_loss`, of a loss that is cut at the stack that stages share."""
    closed, out_tree, _ = _traced(loss, shards, *args)
    return cut_loss(closed, out_tree)


def _traced(
    loss: LossOfShards, shards: Sequence[Shard], *args: PyTree
) -> tuple[core.ClosedJaxpr, Any, dict[str, int]]:
    """The trace of a loss, the structure of its result, and its gathers."""
    closed, shape = jax.make_jaxpr(loss, return_shape=True)(shards, *args)
    inputs = iter(closed.jaxpr.invars)
    values = {}
    for shard in shards:
        value, *_ = [next(inputs) for _ in jax.tree.leaves(shard)]
        if shard.row.unit != ROOT:
            values[value] = shard.row.name
    uses = uses_of_shards(closed.jaxpr, values)
    if uses.misread:
        raise ValueError(
            f"loss_fn computes with {', '.join(sorted(uses.misread))} outside of the "
            "unit, or returns it, where only this device's shard exists. Use a weight "
            "in its unit's __call__, mark the function that uses it with fsdp.unit or "
            "fsdp.scan, or leave it out of `units`. A penalty on weights belongs into "
            "the optimizer (weight_decay)."
        )

    return closed, jax.tree.structure(shape), uses.gathers


def _sum_and_count(loss: Any) -> tuple[Any, Any]:
    if not isinstance(loss, tuple) or len(loss) != 2:
        raise ValueError(
            "With calculate_per_token_loss=True loss_fn returns (sum, count), as in "
            "(losses.sum(), mask.sum()), or ((sum, count), aux) with has_aux=True; it "
            f"returned a {type(loss).__name__}."
        )
    return loss


def _checked_loss(loss: Any) -> Float[Array, ""]:
    loss = jnp.asarray(loss)
    if loss.ndim or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"loss_fn returned {loss.dtype}{list(loss.shape)}; a loss is one floating-"
            "point number, the mean over the rows it was given. Take the mean, or pass "
            "has_aux=True if it returns (loss, aux), calculate_per_token_loss=True if "
            "it returns (sum, count)."
        )
    # Summed over microbatches and ranks: in bfloat16 that would lose digits.
    return loss.astype(jnp.promote_types(loss.dtype, jnp.float32))
