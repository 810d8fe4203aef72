"""Runs a traced step, and records digests of what its devices compute and exchange.

The step runs the same operations on the same values. Beside them each rank computes, in
`shard_map`, a digest of its inputs, of the operands and the results of each collective,
and of its outputs. A rank whose digest is the first to be wrong has computed something
wrong from what was right until then.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec
from jaxtyping import Array, UInt32

from fsdp_jax._jaxpr import function_of
from fsdp_jax.checkpoint._leaf_names import is_key
from fsdp_jax.replay._array_digest import local_digest, mixed
from fsdp_jax.replay._events import Event, Events, Loop
from fsdp_jax.sharding._offload import on_device
from fsdp_jax.step._flat_trace import CALLS, called, is_recomputed

_COLLECTIVES = (
    *("all_gather", "all_gather_invariant", "all_to_all", "ppermute", "pbroadcast"),
    *("pmax", "pmin", "psum", "psum_invariant", "ragged_all_to_all", "reduce_scatter"),
)
_OPENED = (*CALLS, "custom_jvp_call", "custom_vjp_call")

Outputs = tuple[list[Any], Events]
"""Results of a program, and its events."""


def run_recorded(closed: core.ClosedJaxpr, args: Sequence[Any]) -> Outputs:
    """Runs a traced step, and returns its results and what happened in `shard_map`.

    The digests of all ranks, `uint32[ranks, *iterations]`, are in the order of the
    mesh axes that are manual. What a `while` loop does within is one event of unknown
    origin, as are its results.

    Args:
      closed: Trace of the step.
      args: Its arguments.
    """
    return _run(closed.jaxpr, closed.consts, args, is_mapped=False)


def _run(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], *, is_mapped: bool
) -> Outputs:
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))
    closed = core.ClosedJaxpr(jaxpr, list(consts))
    events: list[Any] = []
    for eqn in jaxpr.eqns:
        given = [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
        outs, new = _run_eqn(closed, eqn, given, is_mapped=is_mapped)
        events += new
        env |= dict(zip(eqn.outvars, outs, strict=True))
    results = [v.val if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]
    return results, tuple(events)


def _run_eqn(closed: Any, eqn: Any, given: list[Any], *, is_mapped: bool) -> Outputs:
    name = eqn.primitive.name
    if not _has_events(eqn, is_mapped=is_mapped):
        return _run_plain(closed, eqn, given), ()
    if name in _OPENED:
        if name in CALLS and is_recomputed(eqn):
            given = list(lax.optimization_barrier(tuple(given)))
        inner, consts = called(eqn)
        return _run(inner, consts, given, is_mapped=is_mapped)
    if name == "shard_map" and not is_mapped:
        return _run_mapped(eqn, given)
    if name == "scan":
        return _run_scan(eqn, given)
    if name == "cond":
        return _run_branches(eqn, given)
    # A collective, a `shard_map` over the axes left to XLA, or a `while` loop.
    outs = _run_plain(closed, eqn, given)
    sent, received = Event(_digest(given), True), Event(_digest(outs), False)
    return outs, (sent, received)


def _has_events(eqn: Any, *, is_mapped: bool) -> bool:
    """Returns whether an equation communicates; outside `shard_map`, contains one."""
    name = eqn.primitive.name
    if not is_mapped:
        if name == "shard_map":
            return True
        return name in _OPENED and any(
            _has_events(inner, is_mapped=False) for inner in called(eqn)[0].eqns
        )
    return name in _COLLECTIVES or any(
        _has_events(inner, is_mapped=True)
        for jaxpr in _jaxprs_in(eqn)
        for inner in jaxpr.eqns
    )


def _jaxprs_in(eqn: Any) -> list[Any]:
    if eqn.primitive.name in _OPENED:
        return [called(eqn)[0]]  # And not the rules of a derivative.
    found = []
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                found.append(each.jaxpr)
            elif isinstance(each, core.Jaxpr):
                found.append(each)
    return found


def _run_plain(closed: Any, eqn: Any, given: list[Any]) -> list[Any]:
    pairs = [
        (v, x)
        for v, x in zip(eqn.invars, given, strict=True)
        if not isinstance(v, core.Literal)
    ]
    # A variable may be read twice.
    inputs = dict(pairs)
    kept = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
    empty = core.ClosedJaxpr(closed.jaxpr.replace(constvars=[]), [])
    outs = iter(function_of(empty, list(inputs), kept, [eqn])(*inputs.values()))
    return [None if isinstance(v, core.DropVar) else next(outs) for v in eqn.outvars]


def _run_mapped(eqn: Any, given: list[Any]) -> Outputs:
    params = eqn.params
    mesh, manual = params["mesh"], params["newly_manual_axes"]

    def local(*args):
        outs, events = _run(params["jaxpr"], (), args, is_mapped=True)
        first, last = Event(_digest(args), True), Event(_digest(outs), True)
        all_events = (first, *events, last)
        return outs, jax.tree.map(lambda x: x[None], all_events)

    axes = tuple(axis for axis in mesh.axis_names if axis in manual)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=params["in_specs"],
        out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
        axis_names=set(manual),
        check_vma=params["check_vma"],
    )(*given)


def _run_scan(eqn: Any, given: list[Any]) -> Outputs:
    params, body = eqn.params, eqn.params["jaxpr"]
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, rest = given[:num_consts], given[num_consts:]

    def iteration(carry, x):
        args = [*consts, *carry, *x]
        outs, events = _run(body.jaxpr, body.consts, args, is_mapped=True)
        return outs[:num_carry], (outs[num_carry:], events)

    carry, (ys, events) = lax.scan(
        iteration,
        rest[:num_carry],
        rest[num_carry:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys], (Loop(events, params["reverse"]),)


def _run_branches(eqn: Any, given: list[Any]) -> Outputs:
    index, *operands = given
    branches = eqn.params["branches"]

    def run(branch, *args):
        return _run(branch.jaxpr, branch.consts, args, is_mapped=True)

    # A branch that is not taken has the events of zeros.
    given_to = [functools.partial(run, branch) for branch in branches]
    events = [jax.eval_shape(each, *operands)[1] for each in given_to]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), events)

    def made(number):
        def branch(*args):
            outs, own = given_to[number](*args)
            return outs, [*zeros[:number], own, *zeros[number + 1 :]]

        return branch

    outs, of_all = lax.switch(index, [made(n) for n in range(len(branches))], *operands)
    return outs, tuple(event for own in of_all for event in own)


def _digest(values: Sequence[Any]) -> UInt32[Array, ""]:
    """Returns one digest of several arrays, in their order."""
    total = jnp.uint32(0)
    for number, value in enumerate(values):
        if value is None:  # A result that nothing reads.
            continue
        x = jnp.asarray(value)
        if jax.typeof(x).memory_space == jax.memory.Space.Host:
            x = on_device(x)  # Where it is computed with.
        own = local_digest(jax.random.key_data(x) if is_key(x) else x)
        total = total + mixed(own ^ mixed(jnp.uint32(number)))
    return total
