"""Splits what a unit computes from its weights alone from all else it computes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core

from fsdp_jax._jaxpr import function_of
from fsdp_jax.step._flat_trace import operand, without_dead


def split_unit(compute, unshard, shards, args, *, may_close_over: bool = True):
    """Splits `compute(unshard(shards), *args)` after what depends on shards alone.

    For a unit with weight `w` and argument `x`:

        t = transpose w      # reads w alone: weights_only
        c = iota             # reads constants alone: both
        d = mul t c          # reads what weights_only has: weights_only
        y = dot_general x d  # reads x: rest

    `d` crosses from one function to the other. `w` and `t` do not, since no equation of
    `rest` reads them. An equation `y = jit[f] x w` would be left to `rest`, with all
    that `f` derives from `w`, so such calls are inlined first.

    Args:
      compute: `compute(weights, *args)`, on the unsharded weights.
      unshard: `unshard(shards) -> weights`.
      shards: Shards of the unit, or abstract ones.
      args: Other arguments of `compute`, or abstract ones.
      may_close_over: Whether `compute` may close over traced arrays.

    Returns:
      `weights_only(shards) -> values`, `rest(values, *arg_leaves) -> leaves`, and the
      treedef of the result.

    Raises:
      ValueError: If `compute` closes over a traced array and `may_close_over` is False.
    """
    weights_only, (rest,), out_tree = split_variants(
        [compute], unshard, shards, args, may_close_over=may_close_over
    )
    return weights_only, rest, out_tree


def split_variants(computes, unshard, shards, args, *, may_close_over: bool = True):
    """Splits a unit that computes in one of several ways, as `split_unit` does.

    `weights_only` returns what any of them reads, each value once, so that a unit can
    be gathered without regard to which of them runs it.

    Args:
      computes: Variants of `compute`, whose results have one structure.
      unshard: `unshard(shards) -> weights`.
      shards: Shards of the unit, or abstract ones.
      args: Other arguments of the variants, or abstract ones.
      may_close_over: Whether they may close over traced arrays.

    Returns:
      `weights_only(shards) -> values`, a `rest(values, *arg_leaves) -> leaves` for each
      variant, and the treedef of the result of any.

    Raises:
      ValueError: If a variant closes over a traced array and `may_close_over` is False.
    """
    weights = jax.eval_shape(unshard, shards)
    num_weights = len(jax.tree.leaves(weights))

    def every(*args):
        return [compute(*args) for compute in computes]

    closed, out_shape = jax.make_jaxpr(every, return_shape=True)(weights, *args)
    closed = _inline_mixed_calls(closed, num_weights)
    if not may_close_over:
        _check_closed(closed)
    before, after, derived = _partition(closed, closed.jaxpr.invars[:num_weights])
    outvars = closed.jaxpr.outvars
    if len(computes) > 1:
        before, after, outvars = _each_once(before, after, outvars)
    # Only what `rest` reads, or the unit returns, is an output of `weights_only`.
    used = {v for eqn in after for v in eqn.invars if isinstance(v, core.Var)}
    used |= {v for v in outvars if isinstance(v, core.Var)}
    crossing = [v for v in derived if v in used]
    invars = closed.jaxpr.invars
    first = function_of(closed, invars[:num_weights], crossing, before)
    each = len(outvars) // len(computes)
    seconds = []
    for i in range(len(computes)):
        own = outvars[i * each : (i + 1) * each]
        eqns = after if len(computes) == 1 else without_dead(after, own)
        inputs = [*crossing, *invars[num_weights:]]
        seconds.append(function_of(closed, inputs, own, eqns))

    def weights_only(shards):
        return first(*jax.tree.leaves(unshard(shards)))

    def rest_of(second):
        return lambda values, *arg_leaves: second(*values, *arg_leaves)

    return weights_only, [*map(rest_of, seconds)], jax.tree.structure(out_shape[0])


def _each_once(before, after, outvars):
    """Removes equations of `before` that compute what an earlier one has computed."""
    same, found, kept = {}, [], []
    for eqn in before:
        eqn = eqn.replace(invars=[operand(same, v) for v in eqn.invars])
        key = eqn.primitive, eqn.invars, eqn.params
        earlier = next((made for known, made in found if _equal(known, key)), None)
        if earlier is None:
            kept.append(eqn)
            found.append((key, eqn.outvars))
        else:
            same |= dict(zip(eqn.outvars, earlier, strict=True))
    after = [e.replace(invars=[operand(same, v) for v in e.invars]) for e in after]
    return kept, after, [operand(same, v) for v in outvars]


def _equal(one, other) -> bool:
    (primitive, invars, params), (other_primitive, other_invars, other_params) = (
        one,
        other,
    )
    return (
        primitive is other_primitive
        and len(invars) == len(other_invars)
        and all(map(_is_same, invars, other_invars))
        and params.keys() == other_params.keys()
        and all(_is_same(params[name], other_params[name]) for name in params)
    )


def _is_same(one, other) -> bool:
    """Returns whether two operands or parameters are known to be equal."""
    if isinstance(one, core.Literal) and isinstance(other, core.Literal):
        return one.aval == other.aval and bool(np.all(one.val == other.val))
    plain = (int, float, str, tuple, np.dtype)
    return one is other or (isinstance(one, plain) and one == other)


def _check_closed(closed) -> None:
    """Refuses a unit that closes over traced arrays.

    It runs inside a custom derivative, which returns cotangents of arguments alone.
    """
    caught = [x.aval.str_short() for x in closed.consts if isinstance(x, Tracer)]
    if caught:
        raise ValueError(
            "The unit given to fsdp.scan(prefetch=...) computes with traced value(s) "
            f"that are none of its arguments: {', '.join(caught)}. The object of a "
            "method may hold them. Pass them in `consts` or `xs`, or use prefetch=0."
        )


def _partition(closed, weights):
    """Sorts equations by what they read: weights and constants alone, or other values.

    Returns:
      The equations that read weights and constants alone; all others; and the
      variables that are weights or derived from them. Equations that read constants
      alone are in both lists, which is cheaper than to pass their results across.
    """
    jaxpr = closed.jaxpr
    derived = dict.fromkeys(weights)
    constant = {
        var
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True)
        # A traced array that the unit closes over is another input, and may be one that
        # the loss is differentiated by.
        if not isinstance(value, Tracer)
    }
    before, after = [], []
    for eqn in jaxpr.eqns:
        read = {v for v in eqn.invars if isinstance(v, core.Var)}
        # Effects, such as a print, stay in `rest`: backward runs `weights_only` again.
        if eqn.effects or not read <= constant | derived.keys():
            after.append(eqn)
            continue
        before.append(eqn)
        if read <= constant:
            after.append(eqn)
            constant.update(eqn.outvars)
        else:
            derived.update(dict.fromkeys(eqn.outvars))
    return before, after, list(derived)


def _inline_mixed_calls(closed, num_weights: int):
    """Inlines `jit` calls whose operands are both weights and other values.

    Such a call is one equation, which `_partition` could only leave in `rest` as a
    whole. An inlined call may hold further ones, hence the loop.
    """
    while opened := _mixed_calls(closed, num_weights):
        avals = [v.aval for v in closed.jaxpr.invars]
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        inlined = functools.partial(_evaluate, closed, opened)
        closed = jax.make_jaxpr(inlined)(*shapes)
    return closed


def _mixed_calls(closed, num_weights: int) -> set[int]:
    _, after, derived = _partition(closed, closed.jaxpr.invars[:num_weights])
    return {
        id(eqn)
        for eqn in after
        if eqn.primitive.name in ("jit", "pjit")
        and any(isinstance(v, core.Var) and v in derived for v in eqn.invars)
    }


def _evaluate(closed, opened: set[int], *args):
    """Evaluates a jaxpr; equations whose id is in `opened` are inlined."""
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(v):
        return v.val if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        if id(eqn) in opened:
            outputs = core.jaxpr_as_fun(eqn.params["jaxpr"])(*map(read, eqn.invars))
            env.update(zip(eqn.outvars, outputs, strict=True))
        else:
            # Evaluated as a jaxpr of one equation, which keeps its params, such as the
            # rule of a custom derivative, as they are.
            variables = [v for v in eqn.invars if isinstance(v, core.Var)]
            invars = [v for v in dict.fromkeys(variables) if v not in jaxpr.constvars]
            outvars = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
            single = function_of(closed, invars, outvars, [eqn])
            env.update(zip(outvars, single(*map(read, invars)), strict=True))
    return [read(v) for v in jaxpr.outvars]
