"""Reshard after forward: weights are freed, and gathered again for backward.

To exclude only the gathered value from what a `jax.checkpoint` policy saves is not
enough: the policy then saves what is derived from it, a transpose, a cast, a slice,
which is as large. Instead everything in a unit that depends on its weights alone moves,
together with the gather, into one custom-derivative function whose outputs are never
saved.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core
from jaxtyping import Array

from fsdp_jax._jaxpr import function_of
from fsdp_jax._scopes import FSDP_UNSHARD, traced_as

Policy = Callable[..., bool]


def reshard_after_forward(
    compute: Callable[..., Any],
    unshard: Callable[[Any], Sequence[Array]],
    policy: Policy | None = None,
) -> Callable[..., Any]:
    """Makes a unit whose backward gathers its weights again.

    Args:
      compute: `compute(weights, *args)`, on the unsharded weights.
      unshard: `unshard(shards) -> weights`; only the shards are kept for backward.
      policy: `jax.checkpoint` policy for everything else the unit computes; None saves
        all of it.

    Returns:
      `unit(shards, *args)`, equal to `compute(unshard(shards), *args)`. Values derived
      from weights inside a loop or a custom-derivative function of `compute` are not
      recognised and are saved as `policy` decides. `unit` raises `ValueError` if an
      argument is in float8, see `without_float8`.
    """

    def unit(shards, *args):
        if any(map(is_float8, jax.tree.leaves(args))):
            raise ValueError(_float8_argument(args))
        weights_only, rest, out_tree = split_unit(compute, unshard, shards, args)

        @jax.custom_vjp
        @traced_as(FSDP_UNSHARD)
        def fsdp_unshard(shards):
            return weights_only(shards)

        # The forward rule calls `fsdp_unshard` itself, so that the trace has one
        # equation that `save` can refuse. Of any other function the policy would see
        # the equations within, and save their results.
        fsdp_unshard.defvjp(
            lambda shards: (fsdp_unshard(shards), shards),
            lambda shards, grads: jax.vjp(weights_only, shards)[1](grads),
        )
        return out_tree.unflatten(rest(fsdp_unshard(shards), *jax.tree.leaves(args)))

    return jax.checkpoint(unit, policy=Resharding(policy))


@dataclasses.dataclass(frozen=True)
class Resharding:
    """The `jax.checkpoint` policy of a unit: everything but its gathered weights.

    Attributes:
      policy: Policy for everything else, see `reshard_after_forward`.
    """

    policy: Policy | None

    def __call__(self, primitive: Any, *args: Any, **params: Any) -> bool:
        """Returns whether the results of a primitive are saved."""
        saves = without_float8(self.policy)
        return not _is_unshard(primitive, params) and saves(primitive, *args, **params)


def without_float8(policy: Policy | None) -> Policy:
    """Wraps a policy such that no floating-point array of 8 bits or less is saved.

    `jax.checkpoint` rounds what it saves with `reduce_precision`, which takes the range
    of such a dtype for that of an IEEE format: the largest float8_e4m3fn is then 240
    and not 448 (jax 0.10.2), and larger values become NaN. Casting again is cheap.

    Args:
      policy: `jax.checkpoint` policy for all other arrays; None saves them.
    """

    def save(primitive, *args, **params) -> bool:
        if _makes_float8(args, params):
            return False
        return policy is None or policy(primitive, *args, **params)

    return save


def _float8_argument(args) -> str:
    shapes = [
        f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(args) if is_float8(x)
    ]
    return (
        f"A unit is given {', '.join(shapes)} as an argument. It would be saved for "
        "backward, where jax.checkpoint makes NaN of float8_e4m3fn above 240. Cast to "
        "float8 inside the unit, or set FSDPConfig(reshard_after_forward=False)."
    )


def _makes_float8(args, params) -> bool:
    """Guesses from a policy's arguments whether a primitive has float8 results."""
    if called := params.get("call_jaxpr"):
        return any(is_float8(aval) for aval in called.out_avals)
    dtype = params.get("new_dtype", params.get("preferred_element_type"))
    if dtype is not None:
        return _is_narrow(dtype)
    # A policy is not told the dtype of the results: assume that of the operands.
    return any(is_float8(arg) for arg in args)


def is_float8(array: Any) -> bool:
    """Returns whether an array is floating point of 8 bits or less; may be abstract."""
    return _is_narrow(getattr(array, "dtype", jnp.float32))


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8


def _is_unshard(primitive, params) -> bool:
    if primitive.name != "custom_vjp_call":
        return False
    # By name, since the equation does not hold the Python function.
    return params["call_jaxpr"].jaxpr.debug_info.func_name == FSDP_UNSHARD


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
    weights = jax.eval_shape(unshard, shards)
    num_weights = len(jax.tree.leaves(weights))
    closed, out_shape = jax.make_jaxpr(compute, return_shape=True)(weights, *args)
    closed = _inline_mixed_calls(closed, num_weights)
    if not may_close_over:
        _check_closed(closed)
    jaxpr = closed.jaxpr
    before, after, derived = _partition(closed, closed.jaxpr.invars[:num_weights])
    # Only what `rest` reads, or the unit returns, is an output of `weights_only`.
    used = {v for eqn in after for v in eqn.invars if isinstance(v, core.Var)}
    used |= {v for v in jaxpr.outvars if isinstance(v, core.Var)}
    crossing = [v for v in derived if v in used]
    first = function_of(closed, jaxpr.invars[:num_weights], crossing, before)
    second = function_of(
        closed, [*crossing, *jaxpr.invars[num_weights:]], jaxpr.outvars, after
    )

    def weights_only(shards):
        return first(*jax.tree.leaves(unshard(shards)))

    def rest(values, *arg_leaves):
        return second(*values, *arg_leaves)

    return weights_only, rest, jax.tree.structure(out_shape)


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
