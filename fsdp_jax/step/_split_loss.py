"""Splits a traced loss at the stack of layers that pipeline stages share.

For a loss that traces to

    a = embed tokens            # the carry of the stack: `carry`
    m = mask tokens             # read by the stack: `beside`; by the head: `behind`
    h = fsdp_stack shards m a   # the stack: its layers are run by the stages
    loss = head h m             # `behind`

each part is a function of all leaves of the loss's arguments and runs on any stage. An
equation that two parts need, such as `mask`, is in both: it is computed again and not
passed between stages.

Model state that the first parts read, such as the counter of a dropout key, has a
fourth part, `update`: what it is for the next microbatch, which begins before the loss
of this one is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend import core
from jax.tree_util import tree_leaves_with_path
from jaxtyping import Array

from fsdp_jax._jaxpr import function_of
from fsdp_jax._tree import PyTree, leaf_name
from fsdp_jax.step._layer_stack import STACK, Role, Stack

Leaves = Sequence[Array]


@dataclasses.dataclass(frozen=True)
class SplitLoss:
    """The parts of a loss, each a function of all leaves of the loss's arguments.

    The outputs of the stack are all that passes from the first part to the last.

    Attributes:
      stack: The scan over layers.
      shards: Index among the loss's leaves of each array of the stack's shards.
      carry: `carry(leaves) -> carry leaves`, the input of the first layer.
      beside: `beside(leaves) -> leaves`, the layers' other operands
        `(others, xs, consts)`, flat.
      behind: `behind(leaves, outputs of the stack) -> result of the loss`.
      early: Index among the model state's leaves of those that `carry` and `beside`
        depend on.
      update: `update(leaves) -> leaves of early`, for the next microbatch.
    """

    stack: Stack
    shards: tuple[int, ...]
    carry: Callable[[Leaves], Leaves]
    beside: Callable[[Leaves], Leaves]
    behind: Callable[[Leaves, Leaves], PyTree]
    early: tuple[int, ...]
    update: Callable[[Leaves], Leaves]


def split_loss(
    closed: core.ClosedJaxpr, out_tree: Any, first: int, state: PyTree
) -> SplitLoss:
    """Splits a loss at its one scan over stages.

    Args:
      closed: Traced loss of one microbatch.
      out_tree: Structure of the loss's result, the last leaves of which are the new
        model state.
      first: Index among the loss's leaves of the model state's first one.
      state: Model state, or its shapes.

    Raises:
      ValueError: If there is not exactly one such scan at the top level of the loss,
        the loss changes the stack's weights before it, or reads state before it that
        depends on its outputs.
    """
    jaxpr = closed.jaxpr
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive is STACK]
    if len(scans) != 1:
        raise ValueError(
            "loss_fn must run the stack that pp splits exactly once, and a step finds "
            f"{len(scans)} runs. Call fsdp.scan on the whole stack in the loss itself, "
            "in no jax.jit, jax.checkpoint, loop or branch."
        )
    (scan,) = scans
    stack: Stack = scan.params["stack"]
    by_role = {
        role: [v for v, r in zip(scan.invars, stack.roles, strict=True) if r == role]
        for role in Role
    }
    places = {v: i for i, v in enumerate(jaxpr.invars)}
    # The stages pass shards of their own in the place of these leaves, so no equation
    # may stand between a leaf and the scan.
    if any(v not in places for v in by_role[Role.SHARDS]):
        raise ValueError(
            "loss_fn changes the weights of the stack that pp splits before fsdp.scan "
            "runs it. Pass fsdp.scan the stack as it is in the model."
        )

    def part(outvars: Sequence[Any], given: Sequence[Any] = ()) -> Callable[..., Any]:
        eqns = list(_needed(jaxpr, outvars, without=scan))
        return function_of(closed, [*jaxpr.invars, *given], outvars, eqns)

    carry = part(by_role[Role.CARRY])
    sides = [v for role in _BESIDE for v in by_role[role]]
    beside, behind = part(sides), part(jaxpr.outvars, scan.outvars)
    inputs = [*by_role[Role.CARRY], *sides]
    early, after = _state_before(jaxpr, scan, inputs, first, state)
    update = part(after)
    return SplitLoss(
        stack,
        tuple(places[v] for v in by_role[Role.SHARDS]),
        lambda leaves: carry(*leaves),
        lambda leaves: beside(*leaves),
        lambda leaves, out: out_tree.unflatten(behind(*leaves, *out)),
        early,
        lambda leaves: update(*leaves),
    )


_BESIDE = (Role.OTHERS, Role.XS, Role.CONSTS)


def _state_before(
    jaxpr: Any, scan: Any, inputs: Sequence[Any], first: int, state: PyTree
) -> tuple[tuple[int, ...], list[Any]]:
    """Returns which leaves of the state inputs of the stack depend on.

    Args:
      jaxpr: Jaxpr of the loss.
      scan: Equation of the stack.
      inputs: Variables that the stack reads.
      first: Index among the loss's leaves of the model state's first one.
      state: Model state, or its shapes.

    Returns:
      Their indices among the state's leaves, and the next value of each.
    """
    names = [leaf_name(path) for path, _ in tree_leaves_with_path(state)]
    before = jaxpr.invars[first : first + len(names)]
    after = jaxpr.outvars[len(jaxpr.outvars) - len(names) :]
    next_values = dict(zip(before, after, strict=True))
    known: set[Any] = set()
    wanted = list(inputs)
    while wanted:
        eqns = _needed(jaxpr, wanted, without=scan)
        read = {v for v in wanted if isinstance(v, core.Var)}
        read |= {v for e in eqns for v in e.invars if isinstance(v, core.Var)}
        # In an earlier microbatch, these depended on others of the state.
        new = [v for v in before if v in read and v not in known]
        known.update(new)
        wanted = [next_values[v] for v in new]
    early = tuple(i for i, v in enumerate(before) if v in known)
    _check_known(jaxpr, scan, [(names[i], after[i]) for i in early])
    return early, [after[i] for i in early]


def _check_known(jaxpr: Any, scan: Any, after: Sequence[tuple[str, Any]]) -> None:
    """Refuses state that is to be known before the stack, and is only known after it.

    Args:
      jaxpr: Jaxpr of the loss.
      scan: Equation of the stack.
      after: Name, and variable after the loss, of each leaf that the stack depends on.
    """
    made = set(scan.outvars)
    for eqn in jaxpr.eqns:
        if any(isinstance(v, core.Var) and v in made for v in eqn.invars):
            made.update(eqn.outvars)
    late = [name for name, v in after if isinstance(v, core.Var) and v in made]
    if late:
        raise ValueError(
            f"Model state that loss_fn reads before the stack that pp splits depends "
            f"on the stack's outputs: {', '.join(late)}. The next microbatch begins "
            "before they are known. Read it behind the stack alone, or use pp=1."
        )


def _needed(jaxpr: Any, outvars: Sequence[Any], *, without: Any) -> Iterator[Any]:
    """Returns the equations that `outvars` depend on, in order, without `without`.

    Equations without results, such as prints, belong to `behind` alone, so that they do
    not run once for each part.
    """
    is_behind = outvars is jaxpr.outvars
    wanted = {v for v in outvars if isinstance(v, core.Var)}
    needed = []
    # The scan is skipped, so `behind` has no equation that only its operands need.
    for eqn in reversed(jaxpr.eqns):
        prints = is_behind and not eqn.outvars
        if eqn is not without and (prints or wanted & set(eqn.outvars)):
            needed.append(eqn)
            wanted |= {v for v in eqn.invars if isinstance(v, core.Var)}
    return reversed(needed)
