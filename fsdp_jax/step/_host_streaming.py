"""Runs a function of arrays in host memory with few of them on the device at a time.

An optimizer computes all moments, then all updates, then all weights, each parameter by
parameter: everything would be on the device before the first result is done. So its
equations are reordered, result by result, each with all the equations it needs. Such a
part fetches its operands only when the results of the part `AHEAD` before it are back
on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from fsdp_jax._jaxpr import function_of
from fsdp_jax._tree import PyTree

AHEAD = 2
"""Number of parts on the device, or being copied there or back, at a time."""


def stream(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    from_host: tuple[PyTree, ...],
    to_host: PyTree,
    *,
    order: Sequence[int],
    after: PyTree,
) -> PyTree:
    """Calls `fn(*args)`, some arguments and results of which are in host memory.

    Args:
      fn: Pure function of pytrees of arrays.
      args: Arguments of `fn`.
      from_host: Trees of bools like `args`: whether each leaf is in host memory.
      to_host: Tree of bools like the result: whether each leaf is returned in host
        memory.
      order: Indices of the leaves of the result, in the order in which to compute them.
      after: Arrays that must be computed before the first leaf is fetched.

    Returns:
      The result of `fn`. A leaf that is an argument in host memory stays there.
    """
    abstracts = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*abstracts)
    run = _Run(closed, jax.tree.leaves(args), jax.tree.leaves(from_host), after)
    flags = dict(zip(closed.jaxpr.outvars, jax.tree.leaves(to_host), strict=True))
    for part in _parts(closed.jaxpr, order):
        run.step(part, {v for v, moves in flags.items() if moves})
    return jax.tree.structure(shape).unflatten(run.results())


def _parts(jaxpr: core.Jaxpr, order: Sequence[int]) -> list[list[Any]]:
    """Groups equations by the first result, in `order`, that needs them."""
    makes = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    done: set[int] = set()
    parts = []
    for result in (jaxpr.outvars[at] for at in order):
        open_, own = [result], set()
        while open_:
            v = open_.pop()
            at = None if isinstance(v, core.Literal) else makes.get(v)
            if at is not None and at not in done:
                done.add(at)
                own.add(at)
                open_.extend(jaxpr.eqns[at].invars)
        if own:
            # In program order, so that operands come before their uses.
            parts.append([jaxpr.eqns[at] for at in sorted(own)])
    return parts


class _Run:
    """The state of a program run part by part: its values and their memory space."""

    def __init__(self, closed, args: Sequence[Any], from_host: Sequence[bool], after):
        self.closed = closed
        inputs = list(zip(closed.jaxpr.invars, args, strict=True))
        self.values: dict[Any, Any] = dict(inputs)
        flags = zip(inputs, from_host, strict=True)
        self.on_host = {v: x for (v, x), is_there in flags if is_there}
        # The last entries are what fetches wait for; the first parts wait for `after`.
        self.returned: list[Any] = [jax.tree.leaves(after)] * AHEAD

    def step(self, part: Sequence[Any], to_host: set[Any]) -> None:
        """Fetches the operands of a part, runs it, and copies results to the host."""
        made = [v for eqn in part for v in eqn.outvars]
        read = [v for eqn in part for v in eqn.invars if isinstance(v, core.Var)]
        known = set(made) | set(self.closed.jaxpr.constvars)
        invars = [v for v in dict.fromkeys(read) if v not in known]
        self._fetch([v for v in invars if v in self.on_host])
        outvars = [v for v in made if not isinstance(v, core.DropVar)]
        run = function_of(self.closed, invars, outvars, part)
        results = run(*(self.values[v] for v in invars))
        self.values.update(zip(outvars, results, strict=True))
        back = {
            v: jax.device_put(self.values[v], jax.memory.Space.Host)
            for v in outvars
            if v in to_host
        }
        self.on_host |= back
        if back:
            self.returned.append(list(back.values()))

    def results(self) -> list[Any]:
        """Returns the program's results, from host memory where they are there."""
        host = jax.memory.Space.Host
        # Says so of arguments that are results as they are (frozen parameters) to XLA
        # for abstract devices, whose shardings name no memory.
        kept = {v: jax.device_put(x, host) for v, x in self.on_host.items()}
        found = {**self.values, **kept}
        return [
            v.val if isinstance(v, core.Literal) else found[v]
            for v in self.closed.jaxpr.outvars
        ]

    def _fetch(self, wanted: Sequence[Any]) -> None:
        there = [self.on_host[v] for v in wanted]
        # The barrier delays the copies until an earlier part is back on the host. XLA
        # could start all of them at once, since they depend on nothing else.
        there, _ = lax.optimization_barrier((there, self.returned[-AHEAD]))
        for v, x in zip(wanted, there, strict=True):
            self.values[v] = jax.device_put(x, jax.memory.Space.Device)
            # Later parts read the copy on the device. A result keeps its host array.
            if v not in self.closed.jaxpr.outvars:
                del self.on_host[v]
