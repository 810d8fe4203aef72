"""Optimizer state that no path assigns to one parameter and that gradients change.

Examples are the one vector of `optax.flatten`, and a tuple of moments in the order of
the parameters. They are found in the traced update: their values depend on gradients.
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
from fsdp_jax.optim._matrix_stack import MatrixStack
from fsdp_jax.sharding._param_plan import ParamPlan
from fsdp_jax.training._optimizer import OPTIMIZER_ERRORS

Path = tuple[Any, ...]


def all_of(params: Sequence[ParamPlan]) -> str:
    """Returns a short name of these parameters in this order, with a hash of them."""
    said = json.dumps([[param.name, param.shape] for param in params])
    digest = hashlib.sha256(said.encode()).hexdigest()[:8]
    return f"all {len(params)} trained parameters, {digest}"


def unnamed_arrays(
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    is_unnamed: Callable[[Path], bool],
) -> set[Path]:
    """Returns the paths of arrays in an optimizer state that mix several parameters.

    Args:
      tx: Optimizer.
      params: Abstract parameters as the optimizer sees them.
      state: Abstract state of `tx` for these parameters.
      is_unnamed: Predicate of a path: whether it ends in no parameter's path.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, MatrixStack)
    )
    asked = {path for path, leaf in flat if _is_array(leaf) and is_unnamed(path)}
    if not asked:
        return asked
    try:
        moved = _moved_by_gradients(tx, params, state)
    except OPTIMIZER_ERRORS:
        # The update needs more than gradients: assume that all of its state depends on
        # them. Whether a step can run it is checked by `needs_loss`.
        return asked
    return asked & moved


def _is_array(leaf: Any) -> bool:
    """Returns whether a leaf has several elements and is no key or `MatrixStack`."""
    if isinstance(leaf, MatrixStack) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    return leaf.size > 1


def _moved_by_gradients(
    tx: optax.GradientTransformation, params: PyTree, state: PyTree
) -> set[Path]:
    """Returns the paths of state whose new values depend on gradients.

    Only the first level of the jaxpr is followed: all results of an inner jaxpr are
    taken to depend on all of its arguments.
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
