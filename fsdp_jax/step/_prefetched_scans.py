"""Loops of a traced loss that enter units: replaced by loops that prefetch.

`jax.lax.scan`, and what is made of it (`nnx.scan`, `nn.scan`, folds), is one equation
in the trace of a loss. Where it runs over a stack of shards and its body enters their
unit, the equation is replaced by those of `run_stack`, which gathers the weights of one
iteration while an earlier one computes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core

from fsdp_jax._scopes import AS_WRITTEN, FSDP_SCAN, is_in, traced_function
from fsdp_jax.step._flat_trace import CALLS, called, calling, operand
from fsdp_jax.step._gathered_once import gathered_once
from fsdp_jax.step._held_gathers import hold_gathers
from fsdp_jax.step._lifted_gathers import (
    NotLiftedError,
    gathers_ahead,
    gathers_in_loops,
    num_entries,
    programs,
    renamed_call,
    substituted,
    units_entered,
)
from fsdp_jax.step._loop_equation import Loop
from fsdp_jax.step._shard import Shard
from fsdp_jax.step._sliced_shards import Leaf
from fsdp_jax.step._stack_loop import Place, stack_loop


def prefetch_scans(
    closed: core.ClosedJaxpr, shards: Sequence[Shard], prefetch: int
) -> core.ClosedJaxpr:
    """Replaces the loops over units in the trace of a loss by loops that prefetch.

    Args:
      closed: Trace of the loss; its first inputs are the leaves of `shards`.
      shards: Shards of all parameters.
      prefetch: Number of iterations whose weights are gathered ahead; at least 1.

    Returns:
      The trace with the same inputs, outputs and values. A loop stays as it is if its
      gathers cannot be taken out of its body, and a log record says why; one that runs
      the same units in each iteration gets the barriers of `hold_gathers`.
    """
    leaves = [
        Leaf(i, j, j < len(jax.tree.leaves(shard.value)))
        for i, shard in enumerate(shards)
        for j in range(len(jax.tree.leaves(shard)))
    ]
    known = dict(zip(closed.jaxpr.invars, leaves, strict=False))
    jaxpr = _Scans(shards, prefetch).replaced(closed.jaxpr, known, Place())
    return core.ClosedJaxpr(jaxpr, closed.consts)


_IN_LOOP = Place(is_nested=True, is_last=False)
"""Place of a loop's body."""


# What a loop over n layers becomes, in a trace where `w` are the leaves of a stack of
# shards, `c` the carry and `k` the constants:
#
#     before                                  after
#     c = scan[n] k c w                       c = fsdp_scan w c k     (`run_stack`)
#       body: v = fsdp_unshard w_i              each iteration gathers w_(i + prefetch)
#             c = f(v, c, k)                    and computes f(v_i, c, k)
#
# `lift_gathers` makes the two halves of the body, `w_i -> v` and `(v, c, k) -> c`.
#
# A jaxpr has arrays and no `Shard`s, but the derivative of `fsdp_scan` needs them: the
# plan of each weight, and its `grad_buffer`. So the leaves are followed from the inputs
# of the trace, where their order is known, to the operands of the scan, and shards are
# rebuilt of those. A leaf may pass through calls, copies and barriers, be sliced by a
# loop around the scan, and lose or arrange units, but must have theirs unchanged: the
# cotangent of `fsdp_scan` is that of the leaf itself.
#
# A loop that does not fit keeps its equation and its values, and only loses the
# prefetching, which a log record says.
class _Scans:
    """Replaces the loops over units in a jaxpr, and in what it calls."""

    def __init__(self, shards: Sequence[Shard], prefetch: int) -> None:
        self._shards = shards
        self._prefetch = prefetch

    def replaced(self, jaxpr: Any, known: dict[Any, Leaf], place: Place) -> Any:
        """Returns a jaxpr with its loops replaced; itself if there are none.

        Args:
          jaxpr: Open jaxpr.
          known: Variables that are leaves of shards; those found are added.
          place: Where it runs.
        """
        last = max((at for at, e in enumerate(jaxpr.eqns) if _runs_units(e)), default=0)
        env: dict[Any, Any] = {}
        eqns: list[Any] = []
        for at, eqn in enumerate(jaxpr.eqns):
            eqn = substituted(eqn, env) if env else eqn
            own = dataclasses.replace(place, is_last=place.is_last and at == last)
            eqns += self._equation(eqn, known, env, own)
            for read, made in self._moved(eqn, known):
                known[made] = known[read]
        if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=False)):
            return jaxpr
        return jaxpr.replace(
            eqns=eqns,
            outvars=[operand(env, v) for v in jaxpr.outvars],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )

    def _equation(
        self, eqn: Any, known: dict[Any, Leaf], env: dict[Any, Any], place: Place
    ) -> Sequence[Any]:
        if eqn.primitive.name == "scan":
            return self._scan(eqn, known, env, place)
        if eqn.primitive.name in _SLICES and (leaf := _known(known, eqn.invars[0])):
            reason = "the loss takes slices of the stack itself, without a scan"
            self._refuse_streamed([self._shards[leaf.shard].param.unit], reason)
        if eqn.primitive.name not in CALLS:
            return [eqn]
        return [self._with_body(eqn, eqn.invars, known, place)]

    def _with_body(
        self,
        eqn: Any,
        operands: Sequence[Any],
        known: dict[Any, Leaf],
        place: Place,
    ) -> Any:
        """Replaces the loops in what an equation runs.

        Args:
          eqn: A call, or a loop.
          operands: Its first operands, in which to look for shards.
          known: Variables that are leaves of shards.
          place: Where its body runs.
        """
        inner, consts = called(eqn)
        given = zip(inner.invars, operands, strict=False)
        own = {v: leaf for v, w in given if (leaf := _known(known, w))}
        new = self.replaced(inner, own, place)
        if new is inner:
            return eqn
        return calling(eqn, new, consts)

    def _scan(
        self, eqn: Any, known: dict[Any, Leaf], env: dict[Any, Any], place: Place
    ) -> Sequence[Any]:
        loop = Loop.of(eqn)
        leaves = [_known(known, v) for v in loop.split(eqn.invars)[2]]
        units = units_entered(eqn.params["jaxpr"].jaxpr)
        if not units:
            return [eqn]
        if is_in(eqn.source_info.name_stack, AS_WRITTEN):
            self._refuse_streamed(
                units, "its fsdp.scan(prefetch=0) gathers at its entry"
            )
            return [eqn]
        try:
            if any(leaves):
                consts, carry, xs = loop.split(eqn.invars)
                read = [*consts, *[None] * len(carry), *xs]
                eqn = self._with_body(eqn, read, known, _IN_LOOP)
                loop = Loop.of(eqn)
                run = self._around_loops(loop, leaves, place)
            else:
                consts, _, _ = loop.split(eqn.invars)
                eqn = self._with_body(eqn, consts, known, _IN_LOOP)
                has_loops = eqn is not loop.eqn
                loop = Loop.of(eqn)
                run = self._gathered_once(loop, known)
                if run is None:
                    return [self._of_same_units(loop, known, has_loops=has_loops)]
            return [eqn] if run is None else _spliced(eqn, run, env)
        except NotLiftedError as reason:
            self._refuse_streamed(units, str(reason))
            _say(units[0], reason)
            return [eqn]

    def _around_loops(
        self, loop: Loop, leaves: Sequence[Leaf | None], place: Place
    ) -> Callable[..., Sequence[Any]] | None:
        """Returns what `stack_loop` makes of a loop, whose body may run such loops.

        Args:
          loop: Loop that slices shards.
          leaves: For each array that it slices, the leaf of a shard that it is.
          place: Where the loop runs.

        Raises:
          NotLiftedError: If units of its own are not gathered ahead.
        """
        body = loop.eqn.params["jaxpr"].jaxpr
        inner = _read_by_loops(body)
        given = zip(loop.split(body.invars)[2], leaves, strict=True)
        own = [None if v in inner else leaf for v, leaf in given]
        run = stack_loop(loop, self._shards, own, self._prefetch, place)
        if run is None and inner and units_entered(body):
            raise NotLiftedError("its body runs a loop over the same units")
        return run

    def _gathered_once(
        self, loop: Loop, known: dict[Any, Leaf]
    ) -> Callable[..., Sequence[Any]] | None:
        """Returns what `gathered_once` makes of a loop; see there.

        Args:
          loop: Loop that slices no shards.
          known: Variables that are leaves of shards.

        Raises:
          ValueError: If it is to stream the weights that it gathers.
        """
        consts, _, _ = loop.split(loop.eqn.invars)
        of_shards = [_known(known, v) is not None for v in consts]
        run = gathered_once(loop, of_shards, self._prefetch + 1)
        if run is not None:
            units = units_entered(loop.eqn.params["jaxpr"].jaxpr)
            self._refuse_streamed(units, "it runs the same units in each iteration")
        return run

    def _of_same_units(
        self, loop: Loop, known: dict[Any, Leaf], *, has_loops: bool
    ) -> Any:
        """Returns a loop that runs the same units in each iteration.

        `order_units` orders those that its body runs one by one.

        Args:
          loop: Loop.
          known: Variables that are leaves of shards.
          has_loops: Whether loops in its body have been replaced.

        Raises:
          NotLiftedError: If the loop is left as it is.
        """
        eqn = loop.eqn
        body = eqn.params["jaxpr"]
        entries = num_entries(body.jaxpr)
        has_loops |= gathers_ahead(body.jaxpr)
        if has_loops and not entries:
            return eqn
        if not has_loops and entries <= self._prefetch + 1:
            raise NotLiftedError(
                "a loop or branch in its body enters a unit"
                if gathers_in_loops(body.jaxpr)
                else "it does not slice the whole stack of their shards, as "
                "jax.lax.scan slices its xs"
            )
        reason = "it runs the same units in each iteration"
        self._refuse_streamed(units_entered(body.jaxpr), reason)
        given = zip(body.jaxpr.invars, eqn.invars, strict=True)
        consts, carry, xs = loop.split([*given])
        values = [v for v, w in consts if (leaf := _known(known, w)) and leaf.is_value]
        new = hold_gathers(body.jaxpr, [v for v, _ in [*carry, *xs]], values)
        return calling(eqn, new, body.consts)

    def _refuse_streamed(self, units: Sequence[str], reason: str) -> None:
        """Raises for a loop that does not prefetch, if it is to stream its weights."""
        names = [
            shard.param.name
            for shard in self._shards
            if shard.param.is_streamed and shard.param.unit in units
        ]
        if names:
            raise ValueError(
                "OffloadPolicy(stream_params=True) copies a unit's weights from the "
                f"host in a loop that gathers ahead, and the loop over {names} does "
                f"not: {reason}. Change the loop, or set stream_params=False."
            )

    def _moved(self, eqn: Any, known: dict[Any, Leaf]) -> Iterator[tuple[Any, Any]]:
        """Yields leaves that an equation reads, and those of the same units it makes.

        Units may be taken from a stack, or put into rows of stacks.
        """
        if eqn.primitive.name in ("copy", "optimization_barrier"):
            for read, made in zip(eqn.invars, eqn.outvars, strict=True):
                if _known(known, read):
                    yield read, made
        elif eqn.primitive.name in ("reshape", "slice"):
            read, made = eqn.invars[0], eqn.outvars[0]
            if leaf := _known(known, read):
                ndim = self._shards[leaf.shard].param.ndim_in_unit
                units = [v.aval.shape[v.aval.ndim - ndim :] for v in (read, made)]
                if units[0] == units[1]:
                    yield read, made


def _read_by_loops(jaxpr: Any) -> set[Any]:
    """Returns the inputs of a loop's body that loops in it gather ahead.

    They stay with those; the loop around them may gather other units ahead.
    """
    read: set[Any] = set()
    for eqn in jaxpr.eqns:
        if traced_function(eqn) == FSDP_SCAN:
            read.update(v for v in eqn.invars if isinstance(v, core.Var))
        elif eqn.primitive.name in CALLS:
            inner = called(eqn)[0]
            own = _read_by_loops(inner)
            given = zip(inner.invars, eqn.invars, strict=False)
            read.update(w for v, w in given if v in own and isinstance(w, core.Var))
        elif any(map(gathers_ahead, programs(eqn))):
            read.update(v for v in eqn.invars if isinstance(v, core.Var))
    return read


def _runs_units(eqn: Any) -> bool:
    """Returns whether an equation runs a loop that enters units, or calls such ones."""
    if eqn.primitive.name == "scan":
        return bool(units_entered(eqn.params["jaxpr"].jaxpr))
    return eqn.primitive.name in CALLS and any(map(_runs_units, called(eqn)[0].eqns))


_SLICES = ("slice", "dynamic_slice", "gather")
"""Primitives of an indexed array."""


def _say(unit: str, reason: NotLiftedError) -> None:
    logging.getLogger("fsdp_jax").warning(
        "The weights of unit '%s' are gathered when it begins, not ahead, so that "
        "its loop waits for them: %s.",
        unit,
        reason,
    )


def _spliced(eqn: Any, run: Callable[..., Any], env: dict[Any, Any]) -> list[Any]:
    """Returns the equations of `run` on the operands of `eqn`, in its scopes.

    The results of `eqn` are put into `env`, with what they are now.
    """
    # With their memory spaces, which `ShapeDtypeStruct` has no place for.
    avals = [
        ShapedArray(
            v.aval.shape,
            v.aval.dtype,
            weak_type=_is_weak(v),
            memory_space=v.aval.memory_space,
        )
        for v in eqn.invars
    ]
    traced = jax.make_jaxpr(run)(*avals)
    if traced.consts:
        raise NotLiftedError("it closes over arrays")
    renamed = renamed_call(eqn, traced.jaxpr)
    env.update(zip(eqn.outvars, renamed.outvars, strict=True))
    return renamed.eqns


def _is_weak(v: Any) -> bool:
    return getattr(v.aval, "weak_type", False)


def _known(known: dict[Any, Leaf], v: Any) -> Leaf | None:
    return known.get(v) if isinstance(v, core.Var) else None
