"""What one device does: the loss and gradients of its rows, reduced over all ranks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Key

from fsdp_jax._batch import join_microbatches, split_microbatches
from fsdp_jax._collectives import enter_step, gather_weight, reduce_rest
from fsdp_jax._linen import gather_at_units
from fsdp_jax._mesh import BATCH_AXES, DATA_AXES, axes_in_use, num_devices
from fsdp_jax._objects import mark_objects
from fsdp_jax._plan import ROOT, Plan
from fsdp_jax._shard import Shard
from fsdp_jax._tree import PyTree, named_leaves

LossFn = Callable[..., Any]
"""`loss_fn(model, batch)`, with `rng=key` if it asks, to a loss or `(loss, aux)`."""


@dataclasses.dataclass(frozen=True)
class LossForm:
    """What a loss function returns.

    Attributes:
      has_aux: It returns `(loss, aux)`.
      per_token: In the place of the loss it returns `(sum, count)`.
    """

    has_aux: bool = False
    per_token: bool = False


def global_loss(plan: Plan, loss_fn: LossFn, form: LossForm) -> Callable[..., Any]:
    """`fn(params, batch, rng, model_state) -> (loss, aux)` on global arrays."""
    call = _loss_of_shards(plan, loss_fn, form)
    aux_format = _AuxFormat()

    def local(params, batch, rng, model_state):
        rng = _fold_rank(plan, rng)
        shards = _shards(plan, _enter(plan, params), _sinks(plan))
        total, (count, aux, _) = call(shards, model_state, batch, rng)
        loss = _sum(plan, total) / _at_least_one(_sum(plan, count))
        return loss, _reduce_aux(plan, aux_format.take_apart(aux))

    sharded = _over_mesh(plan, local, out_specs=(PartitionSpec(), _AUX_SPECS))

    def fn(params, batch, rng, model_state):
        loss, aux = sharded(params, batch, rng, model_state)
        return loss, aux_format.put_together(aux)

    return fn


def global_grads(
    plan: Plan, loss_fn: LossFn, form: LossForm, accumulate: int
) -> Callable[..., Any]:
    """`fn(params, batch, rng, model_state) -> ((loss, aux, model_state), grads)`.

    On global arrays. The gradients are those of the loss over the global batch, in the
    mould `plan.grads`.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate}: a step has at least 1 microbatch.")
    call = _loss_of_shards(plan, loss_fn, form)
    aux_format = _AuxFormat()
    # The mean of means is scaled before backward, so that sums over ranks stay in the
    # range of one rank; how many tokens there are is known only at the end.
    num_means = num_devices(plan.mesh, DATA_AXES) * accumulate
    scale = 1 if form.per_token else 1 / num_means

    def scaled_loss(sinks, values, model_state, batch, rng):
        total, (count, aux, model_state) = call(
            _shards(plan, values, sinks), model_state, batch, rng
        )
        aux = aux_format.take_apart(aux)
        return total * scale, ((total, count), aux, model_state)

    def local(params, batch, rng, model_state):
        rng = _fold_rank(plan, rng)
        values = _enter(plan, params)
        backward = jax.grad(scaled_loss, has_aux=True)

        def microbatch(carry, xs):
            grads, state = carry
            index, rows = xs
            pieces = _not_before(plan, values, rows)
            key = jax.random.fold_in(rng, index)
            new, (sums, aux, state) = backward(sinks, pieces, state, rows, key)
            return (jax.tree.map(jnp.add, grads, new), state), (sums, aux)

        sinks = _sinks(plan)
        rows = split_microbatches(batch, accumulate)
        (grads, new_state), ((totals, counts), aux) = lax.scan(
            microbatch, (sinks, model_state), (jnp.arange(accumulate), rows)
        )
        grads = _reduce_grads(plan, grads)
        count = _at_least_one(_sum(plan, counts.sum()))
        if form.per_token:
            grads = [grad / count.astype(grad.dtype) for grad in grads]
        loss = _sum(plan, totals.sum()) / count
        aux = _reduce_aux(plan, _join_aux(aux))
        return (loss, aux, _reduce_state(plan, model_state, new_state)), grads

    grad_specs = [row.spec(row.placements.optimizer) for row in plan.rows]
    whole = PartitionSpec()
    sharded = _over_mesh(
        plan, local, out_specs=((whole, _AUX_SPECS, whole), grad_specs)
    )
    treedef = jax.tree.structure(plan.model.params)

    def fn(params, batch, rng, model_state):
        (loss, aux, new_state), grads = sharded(params, batch, rng, model_state)
        value = (loss, aux_format.put_together(aux), new_state)
        return value, treedef.unflatten(grads)

    return fn


def takes_rng(loss_fn: LossFn) -> bool:
    """Whether the loss asks for a key, by an argument named `rng`."""
    return "rng" in inspect.signature(loss_fn).parameters


def _over_mesh(plan: Plan, local: Callable[..., Any], out_specs: Any):
    """`shard_map` with a plan's in_specs: `local(params, batch, rng, model_state)`."""
    whole = PartitionSpec()
    return jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(plan.specs, PartitionSpec(BATCH_AXES), whole, whole),
        out_specs=out_specs,
        check_vma=False,
    )


def _loss_of_shards(plan: Plan, loss_fn: LossFn, form: LossForm):
    """`call(shards, model_state, batch, rng) -> (sum, (count, aux, model_state))`.

    A loss that is a mean is the sum of one.
    """
    wants_rng = takes_rng(loss_fn)
    treedef = jax.tree.structure(plan.model.params)

    def call(shards: Sequence[Shard], model_state, batch, rng):
        with jax.named_scope("unit:root"):
            leaves = [gather_weight(s) if s.row.unit == ROOT else s for s in shards]
        state = _fold_keys(model_state, rng)
        model = plan.model.merge(treedef.unflatten(leaves), state)
        model = mark_objects(model, plan.unit_classes)
        extra = {"rng": rng} if wants_rng else {}
        with gather_at_units(plan.units):
            out = loss_fn(model, batch, **extra)
        loss, aux = out if form.has_aux else (out, None)
        total, count = _sum_and_count(loss) if form.per_token else (loss, 1)
        if isinstance(model, nnx.Module):
            _, written = plan.model.split(model)
            _check_state(model_state, written)
            model_state = _keep_keys(model_state, written)
        return _checked_loss(total), (jnp.float32(count), aux, model_state)

    return call


def _check_state(before: PyTree, after: PyTree) -> None:
    """Refuses a loss that leaves the model with more or fewer arrays than it had."""
    had, has = (dict(named_leaves(state)) for state in (before, after))
    if had.keys() != has.keys():
        raise ValueError(
            "loss_fn changed which arrays the model holds; new: "
            f"{', '.join(has.keys() - had.keys()) or 'none'}; gone: "
            f"{', '.join(had.keys() - has.keys()) or 'none'}. Take what was sown out "
            "again (nnx.pop(model, nnx.Intermediate)) and return it with has_aux=True."
        )


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


def _enter(plan: Plan, params: PyTree) -> list[Array]:
    values = jax.tree.leaves(params)
    with jax.named_scope("enter_step"):
        return [enter_step(*pair) for pair in zip(plan.rows, values, strict=True)]


def _not_before(plan: Plan, values: Sequence[Array], rows: PyTree) -> list[Array]:
    """Ties the shards of units to a microbatch's rows.

    Gathering them does not depend on the rows, so XLA may move it out of the loop over
    microbatches (on the CPU it does), where all units' whole weights would stay.
    """
    in_units = [v for v, r in zip(values, plan.rows, strict=True) if r.unit != ROOT]
    in_units, _ = lax.optimization_barrier((in_units, rows))
    tied = iter(in_units)
    return [
        v if r.unit == ROOT else next(tied)
        for v, r in zip(values, plan.rows, strict=True)
    ]


def _shards(plan: Plan, values: Sequence[Array], sinks: Sequence[Array]) -> list[Shard]:
    return [Shard(*piece) for piece in zip(values, sinks, plan.rows, strict=True)]


def _sinks(plan: Plan) -> list[Array]:
    """Zeros in the shape and dtype in which each gradient accumulates."""
    sinks = []
    for row in plan.rows:
        shape = list(row.shape)
        if row.dim is not None:
            shape[row.dim] //= num_devices(plan.mesh, row.placements.gradient)
        sinks.append(jnp.zeros(shape, row.precision.main_grads))
    return sinks


def _reduce_grads(plan: Plan, grads: Sequence[Array]) -> list[Array]:
    axes = axes_in_use(plan.mesh, DATA_AXES)
    with jax.named_scope("reduce_rest"):
        return [
            reduce_rest(row, grad, axes)
            for row, grad in zip(plan.rows, grads, strict=True)
        ]


def _fold_rank(plan: Plan, rng: Key[Array, ""]) -> Key[Array, ""]:
    axes = axes_in_use(plan.mesh, DATA_AXES)
    return jax.random.fold_in(rng, lax.axis_index(axes)) if axes else rng


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _fold_keys(state: PyTree, rng: Key[Array, ""]) -> PyTree:
    """Gives every key of the model a value of its own for this rank and microbatch."""
    word = jax.random.bits(rng)

    def fold(leaf):
        if not _is_key(leaf):
            return leaf
        one = functools.partial(jax.random.fold_in, data=word)
        for _ in range(leaf.ndim):
            one = jax.vmap(one)
        return one(leaf)

    return jax.tree.map(fold, state)


def _keep_keys(before: PyTree, after: PyTree) -> PyTree:
    """Takes the state the loss left, with the keys as they were before folding."""
    return jax.tree.map(lambda b, a: b if _is_key(b) else a, before, after)


def _mean(plan: Plan, x: Array) -> Array:
    axes = axes_in_use(plan.mesh, DATA_AXES)
    return lax.pmean(x, axes) if axes else x


def _sum(plan: Plan, x: Array) -> Array:
    axes = axes_in_use(plan.mesh, DATA_AXES)
    return lax.psum(x, axes) if axes else x


def _at_least_one(count: Array) -> Array:
    """A batch without a single token has the loss 0, not 0 / 0."""
    return jnp.where(count == 0, jnp.ones_like(count), count)


def _reduce_state(plan: Plan, before: PyTree, after: PyTree) -> PyTree:
    """Averages statistics over ranks and takes the largest of integers.

    What depends on a rank's rows is so at least one number for all of them. Random
    streams do not: keys were never changed, and all ranks count alike.
    """
    axes = axes_in_use(plan.mesh, DATA_AXES)
    variables = jax.tree.leaves(
        plan.model.state, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    written = [
        isinstance(variable, nnx.Variable) and not isinstance(variable, nnx.RngState)
        for variable in variables
    ]
    flags = jax.tree.structure(before).unflatten(written)

    def reduce(old, new, is_written):
        if not is_written:
            return new
        if jnp.issubdtype(new.dtype, jnp.integer) and axes:
            return lax.pmax(new, axes)
        if not jnp.issubdtype(new.dtype, jnp.floating):
            return new
        wide = jnp.promote_types(new.dtype, jnp.float32)
        return _mean(plan, new.astype(wide)).astype(old.dtype)

    return jax.tree.map(reduce, before, after, flags)


_AUX_SPECS = {
    "means": PartitionSpec(),
    "sums": PartitionSpec(),
    "rows": PartitionSpec(BATCH_AXES),
}


class _AuxFormat:
    """Sorts the leaves of `aux` by how they are reduced, and remembers their places.

    `shard_map` wants to know how its results lie before it traces what they are.
    """

    def __init__(self):
        self._treedef: Any = None
        self._kinds: list[str] = []

    def take_apart(self, aux: PyTree) -> dict[str, list[Array]]:
        """`{"means": ..., "sums": ..., "rows": ...}`."""
        leaves, self._treedef = jax.tree.flatten(aux)
        arrays = [_widen(jnp.asarray(leaf)) for leaf in leaves]
        self._kinds = [_aux_kind(leaf) for leaf in arrays]
        return {
            kind: [a for a, k in zip(arrays, self._kinds, strict=True) if k == kind]
            for kind in _AUX_SPECS
        }

    def put_together(self, parts: dict[str, list[Array]]) -> PyTree:
        """The inverse of `take_apart`."""
        iterators = {kind: iter(leaves) for kind, leaves in parts.items()}
        return self._treedef.unflatten(next(iterators[kind]) for kind in self._kinds)


def _widen(leaf: Array) -> Array:
    """Scalars are summed over ranks: in 8 or 16 bits that would overflow or round."""
    if leaf.ndim:
        return leaf
    inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
    wide = jnp.float32 if inexact else jnp.int32
    return leaf.astype(jnp.promote_types(leaf.dtype, wide))


def _aux_kind(leaf: Array) -> str:
    if leaf.ndim:
        return "rows"
    return "means" if jnp.issubdtype(leaf.dtype, jnp.inexact) else "sums"


def _join_aux(aux: dict[str, list[Array]]) -> dict[str, list[Array]]:
    """Over microbatches, which `scan` has stacked on a leading dim."""
    return {
        "means": [x.mean(0) for x in aux["means"]],
        "sums": [x.sum(0) for x in aux["sums"]],
        "rows": join_microbatches(aux["rows"]),
    }


def _reduce_aux(plan: Plan, aux: dict[str, list[Array]]) -> dict[str, list[Array]]:
    axes = axes_in_use(plan.mesh, DATA_AXES)
    if not axes:
        return aux
    return {
        "means": [lax.pmean(x, axes) for x in aux["means"]],
        "sums": [lax.psum(x, axes) for x in aux["sums"]],
        "rows": aux["rows"],
    }
