"""Checks that a step can run an optimizer: abstract state, arguments of its update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fsdp_jax._tree import PyTree, tree_differences

# Exceptions that optax transformations raise on unsuitable parameters or arguments.
OPTIMIZER_ERRORS = (TypeError, ValueError, AttributeError, KeyError)


def abstract_optimizer_state(tx: optax.GradientTransformation, params: PyTree) -> Any:
    """Returns the abstract state that `tx.init` makes.

    Args:
      tx: Optimizer.
      params: Parameters as the optimizer sees them, arrays or abstract arrays.

    Raises:
      ValueError: If `tx` is no optimizer, `tx.init` fails on a tree of parameters, or
        `tx` is `optax.MultiSteps`.
    """
    check_optimizer(tx)
    try:
        state = jax.eval_shape(tx.init, params)
    except OPTIMIZER_ERRORS as error:
        raise _failed("init", error) from error
    _refuse_multi_steps(state)
    return state


def check_optimizer(tx: Any) -> None:
    """Raises a `ValueError` unless `tx` can be an optax optimizer."""
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return
    kind = type(tx).__name__
    fix = "call it first" if callable(tx) else "it follows the plan, before parameters"
    raise ValueError(
        f"tx is a {kind}, without init and update: pass an optax optimizer, such as "
        f"optax.adamw(1e-3); {fix}."
    )


def needs_loss(tx: optax.GradientTransformation, params: PyTree, state: PyTree) -> bool:
    """Traces one update to determine whether the optimizer needs the loss.

    Args:
      tx: Optimizer.
      params: Abstract parameters as the optimizer sees them.
      state: State from `abstract_optimizer_state`.

    Returns:
      Whether its update needs `value=loss`, as that of
      `optax.contrib.reduce_on_plateau` does.

    Raises:
      ValueError: If it needs more than gradients, state, parameters and the loss, or
        does not return one update per parameter and a state of the same structure and
        shapes as its input.
    """
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        updates, new = jax.eval_shape(tx.update, params, state, params)
        with_loss = False
    except TypeError:
        updates, new = _with_loss(tx, params, state, loss)
        with_loss = True
    except OPTIMIZER_ERRORS as error:
        raise _failed("update", error) from error
    _check_same("updates", updates, "the parameters", params)
    _check_same("a state", new, "the one it was given", state)
    return with_loss


def _with_loss(tx: Any, params: PyTree, state: PyTree, loss: Any) -> Any:
    def update(grads, state, params, loss):
        return tx.update(grads, state, params, value=loss)

    try:
        return jax.eval_shape(update, params, state, params, loss)
    except OPTIMIZER_ERRORS as error:
        raise _failed("update", error) from error


def _failed(what: str, error: Exception) -> ValueError:
    return ValueError(
        f"The optimizer's {what} fails with {type(error).__name__}: "
        f"{str(error).rstrip('.')}. A step calls tx.init(params) and tx.update(grads, "
        "state, params), with value=loss if need be, and params are one tree of "
        "arrays. It does not support optimizers that evaluate the loss themselves "
        "(optax.lbfgs with a line search, sophia) or that take LookaheadParams "
        "(optax.lookahead). Use optax.lbfgs(linesearch=None), the optimizer inside of "
        "lookahead, or a loop of your own with fsdp_jax.value_and_grad."
    )


def _check_same(what: str, got: PyTree, like: str, want: PyTree) -> None:
    differ = tree_differences(got, want, _in_other_shape)
    if differ or jax.tree.structure(got) != jax.tree.structure(want):
        shown = "\n  ".join(differ[:5]) or f"{jax.tree.structure(got)}"
        raise ValueError(
            f"The optimizer's update returns {what} of another structure than {like}, "
            f"in {max(1, len(differ))} place(s):\n  {shown}\nA step carries arrays "
            "that keep their shapes: use an optimizer whose state does."
        )


def _in_other_shape(name: str, leaf: Any, want: Any) -> list[str]:
    # A Variable that `optax.masked` leaves out holds a `MaskedNode`, without a shape.
    has, had = (getattr(x, "shape", None) for x in (leaf, want))
    return [] if has == had else [f"{name}: {has}, not {had}"]


def _refuse_multi_steps(opt_state: PyTree) -> None:
    """Raises on `optax.MultiSteps`: it would keep a second, unreduced gradient set."""
    nodes = jax.tree.leaves(
        opt_state, is_leaf=lambda n: isinstance(n, optax.MultiStepsState)
    )
    if any(isinstance(node, optax.MultiStepsState) for node in nodes):
        raise ValueError(
            "optax.MultiSteps accumulates gradients between calls of the step. Use "
            "make_train_step(..., num_microbatches=k) with the inner optimizer "
            "instead: it does so within one step and reduces only as often as the "
            "strategy needs."
        )
