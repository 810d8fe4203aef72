"""A function of arrays in the host's memory, run such that few of them are fetched.

An optimizer updates all moments, then all updates, then all weights, parameter after
parameter in each: everything would be on the device before the first result is done.
So its program is put into another order, one result with all that it needs after the
other, and what a part fetches waits until the results of the part before the last one
are back on the host.
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
"""Parts that are on the device, or on their way there or back, at a time."""


def stream(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    from_host: tuple[PyTree, ...],
    to_host: PyTree,
    *,
    order: Sequence[int],
    after: PyTree,
) -> PyTree:
    """Calls `fn(*args)`, some arguments and results of which lie on the host.

    Args:
      fn: A pure function.
      args: Its arguments.
      from_host: The same trees of bools: which leaves lie on the host.
      to_host: A tree of bools like the result: which leaves are to lie there.
      order: The places of the leaves of the result, in the order in which they are to
        be computed.
      after: Arrays that are there before the first leaf is fetched.
    """
    moulds = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*moulds)
    run = _Run(closed, jax.tree.leaves(args), jax.tree.leaves(from_host), after)
    flags = dict(zip(closed.jaxpr.outvars, jax.tree.leaves(to_host), strict=True))
    for part in _parts(closed.jaxpr, order):
        run.step(part, {v for v, moves in flags.items() if moves})
    return jax.tree.structure(shape).unflatten(run.results())


def _parts(jaxpr: core.Jaxpr, order: Sequence[int]) -> list[list[Any]]:
    """The equations, those of each result in turn that the ones before did not need."""
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
            parts.append([jaxpr.eqns[at] for at in sorted(own)])
    return parts


class _Run:
    """The parts of a program that have run, and where their values are."""

    def __init__(self, closed, args: Sequence[Any], from_host: Sequence[bool], after):
        self.closed = closed
        inputs = list(zip(closed.jaxpr.invars, args, strict=True))
        self.values: dict[Any, Any] = dict(inputs)
        flags = zip(inputs, from_host, strict=True)
        self.on_host = {v: x for (v, x), is_there in flags if is_there}
        self.returned: list[Any] = [jax.tree.leaves(after)] * AHEAD

    def step(self, part: Sequence[Any], to_host: set[Any]) -> None:
        """Fetches what a part reads, runs it, and sends back what it is to."""
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
        """Those of the program, on the host where they are to be or were."""
        found = {**self.values, **self.on_host}
        return [
            v.val if isinstance(v, core.Literal) else found[v]
            for v in self.closed.jaxpr.outvars
        ]

    def _fetch(self, wanted: Sequence[Any]) -> None:
        there = [self.on_host[v] for v in wanted]
        there, _ = lax.optimization_barrier((there, self.returned[-AHEAD]))
        for v, x in zip(wanted, there, strict=True):
            self.values[v] = jax.device_put(x, jax.memory.Space.Device)
            if v not in self.closed.jaxpr.outvars:
                del self.on_host[v]
