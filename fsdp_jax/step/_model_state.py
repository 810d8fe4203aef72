"""Model state in a step: keys, statistics and counters, which are not parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Key

from fsdp_jax._scopes import MODEL_STATE
from fsdp_jax._tree import PyTree, named_leaves
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.sharding._variables import equinox_classes
from fsdp_jax.step._shard import is_shard


class Tally(nnx.Variable):
    """A counter in a model that all ranks and microbatches add to.

    The increments of a step are summed over ranks, e.g. of the tokens that an expert
    received. Other floating-point state is averaged over ranks; of other integers the
    largest is taken.
    """


@dataclasses.dataclass(frozen=True)
class UpdatedModel:
    """New model state, which a loss returns in the place of `aux`.

    A linen or equinox model is immutable: `return loss, fsdp.step.UpdatedModel(...)`
    is how running statistics of BatchNorm get into `TrainState.model_state`. An nnx
    model is mutable, and its state is read from the model.

    Attributes:
      model: Model with new state, or a part of its tree, such as the variables that
        linen's `apply(..., mutable=["batch_stats"])` returns. Its parameters are not
        read.
      aux: Auxiliary output of the loss; None without.
    """

    model: Any
    aux: Any = None


def fold_rank(key: Key[Array, ""], data_axes: tuple[str, ...]) -> Key[Array, ""]:
    """Folds the index of the data rank into a key, so that ranks draw differently."""
    return jax.random.fold_in(key, lax.axis_index(data_axes)) if data_axes else key


def fold_keys(state: PyTree, key: Key[Array, ""]) -> PyTree:
    """Folds `key`, the key of a rank and microbatch, into every key of the state."""
    word = jax.random.bits(key)  # `fold_in` takes 32 bits, not a key.

    def fold(leaf):
        if not _is_key(leaf):
            return leaf
        # `fold_in` takes a single key: a vmap for each dim of a stack of keys.
        one = functools.partial(jax.random.fold_in, data=word)
        for _ in range(leaf.ndim):
            one = jax.vmap(one)
        return one(leaf)

    return jax.tree.map(fold, state)


def written_state(before: PyTree, after: PyTree) -> PyTree:
    """Returns the state that the loss left, with its keys as they were before.

    Raises:
      ValueError: If the loss left the model with more or fewer arrays than it had, or
        with one of another shape, or of a dtype whose numbers its own does not have.
    """
    had, has = (dict(named_leaves(state)) for state in (before, after))
    if had.keys() != has.keys():
        raise ValueError(
            "loss_fn changed which arrays the model holds; new: "
            f"{', '.join(has.keys() - had.keys()) or 'none'}; gone: "
            f"{', '.join(had.keys() - has.keys()) or 'none'}. Take what was sown out "
            "again (nnx.pop(model, nnx.Intermediate)) and return it with has_aux=True."
        )
    wrong = [
        f"{name}: {_shown(has[name])}, was {_shown(old)}"
        for name, old in had.items()
        if not _is_key(old) and not _may_become(has[name], old)
    ]
    if wrong:
        raise ValueError(
            "loss_fn wrote arrays of other shapes or dtypes than the model's own: "
            f"{'; '.join(wrong)}. Write them as they are made, with .astype(...)."
        )
    return jax.tree.map(
        lambda old, new: old if _is_key(old) else jnp.asarray(new, old.dtype),
        before,
        after,
    )


def _may_become(new: Any, old: Any) -> bool:
    """Returns whether a value may be kept in the dtype of the one before."""
    new = jnp.asarray(new)
    if new.shape != old.shape:
        return False
    for kind in (jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(old.dtype, kind) and jnp.issubdtype(new.dtype, kind):
            return True
    return jnp.can_cast(new.dtype, old.dtype, "same_kind")


def _shown(leaf: Any) -> str:
    array = jnp.asarray(leaf)
    return f"{array.dtype}{list(array.shape)}"


def put_updated(plan: Plan, before: PyTree, updated: PyTree) -> PyTree:
    """Returns the state, with the leaves that an `UpdatedModel` has replaced.

    Raises:
      ValueError: If `updated` has none of the state's arrays, one that the model does
        not have, or one of another shape or dtype.
    """
    user = plan.model.adapted.model if plan.model.adapted else plan.model
    params = {name for name, _ in named_leaves(user.params)}
    had = dict(named_leaves(before))
    # A shard is a leaf here, with the name of its parameter.
    has = {
        name: leaf
        for name, leaf in named_leaves(updated, is_shard)
        if name not in params and isinstance(leaf, (jax.Array, np.ndarray))
    }
    wrong = [f"{name}: the model has none" for name in has if name not in had]
    wrong += [
        f"{name}: {has[name].dtype}{list(has[name].shape)}, was "
        f"{old.dtype}{list(old.shape)}"
        for name, old in had.items()
        if name in has and (has[name].shape, has[name].dtype) != (old.shape, old.dtype)
    ]
    if wrong or not has:
        problems = "; ".join(wrong) or "it has none of them"
        raise ValueError(
            "UpdatedModel(...) does not fit the model's arrays that are not "
            f"parameters: {problems}. Return them in the tree and the dtypes of "
            "make_model, and what was sown as aux."
        )
    leaves = [old if _is_key(old) else has.get(name, old) for name, old in had.items()]
    return jax.tree.structure(before).unflatten(leaves)


@contextmanager
def states_take_constants() -> Iterator[None]:
    """Context in which an equinox State takes constants.

    It compares the type of a new value with that of the old one. Within a step the type
    of a traced array names the mesh, and that of `jnp.array(False)`, which equinox's
    own BatchNorm writes in its `ema` mode, does not.
    """
    replaced = [(cls, cls.set) for cls in equinox_classes("State")]

    def taking(original):
        def set(self, item, value):
            old = self.get(item)
            if jax.tree.structure(old) == jax.tree.structure(value):
                value = jax.tree.map(_traced_as, value, old)
            return original(self, item, value)

        return functools.wraps(original)(set)

    for cls, original in replaced:
        cls.set = taking(original)
    try:
        yield
    finally:
        for cls, original in replaced:
            cls.set = original


def _traced_as(value: Any, old: Any) -> Any:
    """Returns a new value of a State, with the old type where only a mesh differs."""
    value = jnp.asarray(value)
    if (value.shape, value.dtype) != (old.shape, old.dtype):
        return value  # Refused by equinox.
    if jax.typeof(value).sharding == jax.typeof(old).sharding:
        return value
    return lax.select(lax.full_like(old, False, bool), old, value)


def refuse_state(plan: Plan, aux: PyTree) -> None:
    """Refuses new model state returned as `aux`, where it would be lost."""
    states = equinox_classes("State")

    def is_state(node):
        return isinstance(node, states)

    known = dict(named_leaves(plan.model.state))
    found = [
        name or "aux"
        for name, leaf in named_leaves(aux, is_state)
        if is_state(leaf)
        or any(
            name == n
            or name.endswith(f".{n}")
            or ("." in name and n.endswith(f".{name}"))
            for n, old in known.items()
            if getattr(leaf, "shape", None) == old.shape
        )
    ]
    if found:
        raise ValueError(
            f"loss_fn returns {', '.join(found[:5])} as aux, which would be no new "
            "value of the model's arrays that are not parameters. Return "
            "(loss, fsdp.step.UpdatedModel(model, aux)), with the model's new arrays "
            "in `model` and all else in `aux`."
        )


@jax.named_scope(MODEL_STATE)
def reduce_state(
    plan: Plan, before: PyTree, after: PyTree, data_axes: tuple[str, ...]
) -> PyTree:
    """Reduces the state to one for all ranks: sums tallies, averages statistics.

    Integers become the maximum over ranks, and a bool is true if it is on any rank.
    Random streams are not reduced: keys do not change, and all ranks count alike.
    """
    kinds = jax.tree.structure(before).unflatten(_kinds(plan))
    is_new = _written_anywhere(before, after, data_axes)

    def reduce(old, new, kind, is_new):
        if kind == "kept" or not data_axes:
            return new
        if kind == "summed" and new.dtype == jnp.bool_:
            raise ValueError("A Tally of bools has no sum: make it of integers.")
        if kind == "summed":
            return old + lax.psum(new - old, data_axes)
        if new.dtype == jnp.bool_:
            return lax.pmax(new.astype(jnp.int32), data_axes).astype(jnp.bool_)
        if jnp.issubdtype(new.dtype, jnp.integer):
            return lax.pmax(new, data_axes)
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return new
        # In bfloat16 the sum over ranks would be rounded.
        wide = jnp.promote_types(new.dtype, jnp.float32)
        mean = lax.pmean(new.astype(wide), data_axes).astype(old.dtype)
        return jnp.where(is_new, mean, old)

    return jax.tree.map(reduce, before, after, kinds, is_new)


def _written_anywhere(
    before: PyTree, after: PyTree, data_axes: tuple[str, ...]
) -> PyTree:
    """Returns for each floating-point leaf whether any rank has written to it.

    Leaves that no rank has written to keep their value: a mean of equal numbers may
    differ from them in the last bit, so that a constant would drift.
    """
    leaves, treedef = jax.tree.flatten(before)
    if not leaves or not data_axes:
        return treedef.unflatten([True] * len(leaves))
    flags = [
        jnp.any(old != new) if jnp.issubdtype(old.dtype, jnp.inexact) else False
        for old, new in zip(leaves, jax.tree.leaves(after), strict=True)
    ]
    # Stacked, so that one all-reduce serves all leaves.
    flags = lax.pmax(jnp.stack(flags).astype(jnp.int32), data_axes)
    return treedef.unflatten(list(flags > 0))


def check_call(plan: Plan, needs_key: bool, key: Any, model_state: Any) -> None:
    """Refuses a call without the model state, or the key, that the model needs."""
    missing = [name for name, _ in named_leaves(plan.model_state)]
    if model_state is None and missing:
        raise ValueError(
            f"The model has {len(missing)} array(s) that are not parameters: "
            f"{', '.join(missing[:5])}. Pass model_state=state.model_state, as made by "
            "fsdp_jax.init_state."
        )
    if needs_key and key is None:
        raise ValueError(
            "The loss or the model is random (dropout, or an argument `key`). Pass "
            "key=jax.random.key(...), a different one each call."
        )


def _kinds(plan: Plan) -> list[str]:
    """Returns the reduction of each leaf of the state: kept, summed or agreed."""
    state = plan.model.state
    if isinstance(state, nnx.State):

        def is_variable(node):
            return isinstance(node, nnx.Variable)

        variables = jax.tree.leaves(state, is_leaf=is_variable)
        # A Variable may hold a tree of arrays, or none.
        return [_kind(one) for one in variables for _ in jax.tree.leaves(one)]
    return ["agreed"] * len(jax.tree.leaves(state))


def _kind(variable: Any) -> str:
    if isinstance(variable, Tally):
        return "summed"
    is_state = isinstance(variable, nnx.Variable)
    return "agreed" if is_state and not isinstance(variable, nnx.RngState) else "kept"


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
