"""Runs a function of arrays in host memory with few of them on the device at a time.

An optimizer computes all moments, then all updates, then all weights, each parameter by
parameter: everything would be on the device before the first result is done. So its
equations are reordered, parameter by parameter, each with all that it needs. Such a
part fetches its operands only when the results of the part `AHEAD` before it are back
on the host. A part that computes each layer of a stack by itself runs in a loop, with
one layer on the device at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from fsdp_jax._jaxpr import function_of
from fsdp_jax._scopes import BY_LAYER
from fsdp_jax._tree import PyTree
from fsdp_jax.step._by_layer import LoopOverLayers, TwoTraces
from fsdp_jax.step._inlined import inlined

AHEAD = 2
"""Number of parts on the device, or being copied there or back, at a time."""


def stream(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    from_host: tuple[PyTree, ...],
    to_host: PyTree,
    *,
    stacks: tuple[PyTree, ...],
    order: Sequence[Sequence[int]],
    after: PyTree,
) -> PyTree:
    """Calls `fn(*args)`, some arguments and results of which are in host memory.

    Args:
      fn: Pure function of pytrees of arrays. The leaves of its result take the places
        of its first arguments, in their order.
      args: Arguments of `fn`.
      from_host: Trees of bools like `args`: whether each leaf is in host memory.
      to_host: Tree of bools like the result: whether each leaf is returned in host
        memory.
      stacks: Trees of bools like `args`: whether each leaf is a stack of layers, which
        are its first dim, that is not to be on the device as a whole.
      order: Indices of the leaves of the result, in the order in which to compute them;
        each group is one part.
      after: Arrays that must be computed before the first leaf is fetched.

    Returns:
      The result of `fn`. A leaf that is an argument in host memory stays there.
    """
    abstracts = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*abstracts)
    closed = inlined(closed)
    run = _Run(closed, jax.tree.leaves(args), jax.tree.leaves(from_host), after)
    flags = zip(closed.jaxpr.outvars, jax.tree.leaves(to_host), strict=True)
    places = {
        v: old
        for (v, moves), old in zip(flags, closed.jaxpr.invars, strict=False)
        if moves and isinstance(v, core.Var)
    }
    traces = _of_one_layer(fn, closed, abstracts, stacks)
    for part in _parts(closed.jaxpr, order):
        loop = traces and traces.loop(part, run.on_host, places)
        whole = part if loop is None else loop.before
        run.step([closed.jaxpr.eqns[at] for at in whole], places.keys())
        if traces and loop:
            run.loop(loop, traces)
    return jax.tree.structure(shape).unflatten(run.results())


def _of_one_layer(
    fn: Callable[..., PyTree], closed: core.ClosedJaxpr, abstracts: Any, stacks: Any
) -> TwoTraces | None:
    """Traces `fn` for stacks of one layer too; None if it is another program then."""
    if not any(jax.tree.leaves(stacks)):
        return None

    def of_one(x, is_stack):
        return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) if is_stack else x

    try:
        single = inlined(jax.make_jaxpr(fn)(*jax.tree.map(of_one, abstracts, stacks)))
    except (TypeError, ValueError):  # It is made for the shapes of all layers.
        return None
    traces = TwoTraces(closed, single)
    return traces if traces.are_alike else None


def _parts(jaxpr: core.Jaxpr, order: Sequence[Sequence[int]]) -> list[list[int]]:
    """Groups equations by the first results, in `order`, that need them.

    Returns:
      Indices of the equations of each part, in program order.
    """
    makes = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    done: set[int] = set()
    parts = []
    for group in order:
        open_, own = [jaxpr.outvars[at] for at in group], set()
        while open_:
            v = open_.pop()
            at = None if isinstance(v, core.Literal) else makes.get(v)
            if at is not None and at not in done:
                done.add(at)
                own.add(at)
                open_.extend(jaxpr.eqns[at].invars)
        if own:
            parts.append(sorted(own))
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

    def step(self, part: Sequence[Any], to_host: Collection[Any]) -> None:
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

    def loop(self, part: LoopOverLayers, traces: TwoTraces) -> None:
        """Runs a part layer by layer; its results are in host memory."""
        one, host = traces.of_one, jax.memory.Space.Host
        eqns = [traces.single.jaxpr.eqns[at] for at in part.inside]
        reads = [one[v] for v in (*part.stacks, *part.constants)]
        run = function_of(traces.single, reads, [one[v] for v in part.results], eqns)
        self._fetch([v for v in part.constants if v in self.on_host])
        constants = [self.values[v] for v in part.constants]
        replaced = list(part.results.values())
        stacks = list(dict.fromkeys((*part.stacks, *replaced)))
        arrays = [self.on_host.get(v, self.values[v]) for v in stacks]
        # As in `_fetch`, until an earlier part is back on the host.
        arrays, _ = lax.optimization_barrier((arrays, self.returned[-AHEAD]))
        given = dict(zip(stacks, arrays, strict=True))

        def body(layer, old):
            current = given | dict(zip(replaced, old, strict=True))
            slices = [lax.dynamic_index_in_dim(current[v], layer) for v in part.stacks]
            there = [jax.device_put(x, jax.memory.Space.Device) for x in slices]
            made = [jax.device_put(x, host) for x in run(*there, *constants)]
            # In place: a loop that made new stacks would take host memory for them.
            return [
                lax.dynamic_update_index_in_dim(stack, new, layer, 0)
                for stack, new in zip(old, made, strict=True)
            ]

        with jax.named_scope(BY_LAYER):
            old = [jax.device_put(given[v], host) for v in replaced]
            results = lax.fori_loop(0, len(arrays[0]), body, old)
        self.on_host |= dict(zip(part.results, results, strict=True))
        self.returned.append(results)

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
