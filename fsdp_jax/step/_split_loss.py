"""A traced loss in three parts: before the stack of layers, the stack, behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend import core
from jaxtyping import Array

from fsdp_jax._jaxpr import function_of
from fsdp_jax._tree import PyTree
from fsdp_jax.step._layer_stack import STACK, Role, Stack

Leaves = Sequence[Array]


@dataclasses.dataclass(frozen=True)
class CutLoss:
    """The parts of a loss; each is handed all leaves of the loss's own arguments.

    Nothing crosses from the part before to the part behind but through the stack: what
    both compute, each computes itself.

    Attributes:
      stack: The scan.
      shards: For each of its shards' arrays, which of the loss's leaves it is.
      carry: `carry(leaves) -> carry leaves`: what the first layer gets.
      beside: `beside(leaves)`: what layers get besides, `(others, xs, consts)`, flat.
      behind: `behind(leaves, outputs of the stack) -> result of the loss`.
    """

    stack: Stack
    shards: tuple[int, ...]
    carry: Callable[[Leaves], Leaves]
    beside: Callable[[Leaves], Leaves]
    behind: Callable[[Leaves, Leaves], PyTree]


def cut_loss(closed: core.ClosedJaxpr, out_tree: Any) -> CutLoss:
    """Cuts a loss at its one scan over stages.

    Args:
      closed: The trace of the loss of a microbatch.
      out_tree: The structure of its result.

    Raises:
      ValueError: If there is not one such scan, or it runs within another function.
    """
    jaxpr = closed.jaxpr
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive is STACK]
    if len(scans) != 1:
        raise ValueError(
            f"loss_fn runs the stack that pp splits {len(scans)} times where a step "
            "can see it; it is to be once. Call fsdp.scan on the whole stack in the "
            "loss itself, in no jax.jit, jax.checkpoint, loop or branch."
        )
    (scan,) = scans
    stack: Stack = scan.params["stack"]
    by_role = {
        role: [v for v, r in zip(scan.invars, stack.roles, strict=True) if r == role]
        for role in Role
    }
    places = {v: i for i, v in enumerate(jaxpr.invars)}
    if any(v not in places for v in by_role[Role.SHARDS]):
        raise ValueError(
            "loss_fn changes the weights of the stack that pp splits before fsdp.scan "
            "runs it. Hand fsdp.scan the stack as it is in the model."
        )

    def part(outvars: Sequence[Any], given: Sequence[Any] = ()) -> Callable[..., Any]:
        eqns = list(_needed(jaxpr, outvars, without=scan))
        return function_of(closed, [*jaxpr.invars, *given], outvars, eqns)

    carry = part(by_role[Role.CARRY])
    sides = [v for role in _BESIDE for v in by_role[role]]
    beside, behind = part(sides), part(jaxpr.outvars, scan.outvars)
    return CutLoss(
        stack,
        tuple(places[v] for v in by_role[Role.SHARDS]),
        lambda leaves: carry(*leaves),
        lambda leaves: beside(*leaves),
        lambda leaves, out: out_tree.unflatten(behind(*leaves, *out)),
    )


_BESIDE = (Role.OTHERS, Role.XS, Role.CONSTS)


def _needed(jaxpr: Any, outvars: Sequence[Any], *, without: Any) -> Iterator[Any]:
    """The equations that `outvars` depend on, in order, but for one.

    Of the part behind also those without results, which print something.
    """
    is_behind = outvars is jaxpr.outvars
    wanted = {v for v in outvars if isinstance(v, core.Var)}
    needed = []
    for eqn in reversed(jaxpr.eqns):
        prints = is_behind and not eqn.outvars
        if eqn is not without and (prints or wanted & set(eqn.outvars)):
            needed.append(eqn)
            wanted |= {v for v in eqn.invars if isinstance(v, core.Var)}
    return reversed(needed)
