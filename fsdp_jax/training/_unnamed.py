"""Optimizer state that no path gives to one parameter, and that gradients change.

Such are the one vector of `optax.flatten`, and a tuple of moments in the order of the
parameters. Whether an array is such, its update says: it follows from gradients.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from fsdp_jax._tree import PyTree
from fsdp_jax.optim._matrix_stack import Dealt
from fsdp_jax.sharding._param_plan import ParamPlan
from fsdp_jax.training._optimizer import OPTIMIZER_ERRORS

Path = tuple[Any, ...]


def all_of(rows: Sequence[ParamPlan]) -> str:
    """A short name for these parameters in this order; others have another."""
    said = json.dumps([[row.name, row.shape] for row in rows])
    digest = hashlib.sha256(said.encode()).hexdigest()[:8]
    return f"all {len(rows)} trained parameters, {digest}"


def unnamed_arrays(
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    is_unnamed: Callable[[Path], bool],
) -> set[Path]:
    """The paths in an optimizer state of arrays with values of several parameters.

    Args:
      tx: The optimizer.
      params: Shapes of what it takes for the parameters.
      state: Shapes of its state for these.
      is_unnamed: Whether a path ends in no parameter's.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, Dealt)
    )
    asked = {path for path, leaf in flat if _is_array(leaf) and is_unnamed(path)}
    if not asked:
        return asked
    try:
        moved = _moved_by_gradients(tx, params, state)
    except OPTIMIZER_ERRORS:
        # It wants more than gradients: take all of it for moved. Whether a step can
        # give it that is for the step to say.
        return asked
    return asked & moved


def _is_array(leaf: Any) -> bool:
    """Whether it is more than one number, and neither PRNG keys nor known by name."""
    if isinstance(leaf, Dealt) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    return leaf.size > 1


def _moved_by_gradients(
    tx: optax.GradientTransformation, params: PyTree, state: PyTree
) -> set[Path]:
    """The paths of what an update makes from gradients.

    As far as its program shows at its first level: what an inner program makes follows
    from all that it is given.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    closed = jax.make_jaxpr(lambda *args: tx.update(*args)[1])(params, state, params)
    moved = set(closed.jaxpr.invars[: len(jax.tree.leaves(params))])
    for eqn in closed.jaxpr.eqns:
        if any(v in moved for v in eqn.invars if not isinstance(v, core.Literal)):
            moved.update(eqn.outvars)
    ends = zip(paths, closed.jaxpr.outvars, strict=True)
    return {
        path for (path, _), v in ends if not isinstance(v, core.Literal) and v in moved
    }
