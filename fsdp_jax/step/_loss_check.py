"""Checks of a traced loss: misused shards or gradients, and divergent collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
from jax.extend import core

from fsdp_jax._tree import PyTree
from fsdp_jax.sharding._mesh import DATA_AXES
from fsdp_jax.sharding._plan import ROOT
from fsdp_jax.step._gradient_flow import Constant, Fact, Grad, Other, gradient_flow
from fsdp_jax.step._rank_dependence import Axes, Divided, divided_collectives
from fsdp_jax.step._shard import Shard
from fsdp_jax.step._shard_usage import Uses, is_gather, uses_of_shards


def check_loss(
    jaxpr: core.Jaxpr,
    shards: Sequence[Shard],
    args: Sequence[PyTree],
    axes: Sequence[str],
    *,
    is_split: bool = False,
) -> dict[str, int]:
    """Checks the trace of a loss.

    Args:
      jaxpr: Trace of the loss as a function of the shards and `args`; the model state
        is its last result.
      shards: Shards of all parameters.
      args: Model state, batch and key, then arguments that are equal on all ranks.
      axes: Mesh axes of more than one device.
      is_split: Whether the loss is that of a pipeline, whose backward is not traced. A
        unit then counts as a collective of its own.

    Returns:
      The number of gathers of each unit's parameter, see `uses_of_shards`.

    Raises:
      ValueError: If the loss computes with a shard as if it were the weight,
        differentiates with respect to one, or runs collectives that not all ranks
        reach. The error lists all offenders of one kind.
    """
    uses = _checked_uses(jaxpr, shards)
    _refuse_inner_derivatives(gradient_flow(jaxpr))
    _check_ranks(jaxpr, shards, args, axes, is_split=is_split)
    return uses.gathers


def check_gradients(
    jaxpr: core.Jaxpr,
    shards: Sequence[Shard],
    args: Sequence[PyTree],
    axes: Sequence[str],
) -> set[str]:
    """Checks the trace of a loss and its gradients.

    Args:
      jaxpr: Trace as a function of the shards and `args`. Its results begin with the
        gradients of the shards that have a `grad_buffer` and end with the model state.
      shards: Shards of all parameters.
      args: Model state, batch and key, then arguments that are equal on all ranks.
      axes: Mesh axes of more than one device.

    Returns:
      Names of parameters whose gradients are results of the program as they left their
      units, exactly once.

    Raises:
      ValueError: If a derivative rule of the user computes with this device's piece of
        a gradient, or backward runs collectives that not all ranks reach. The error
        lists all offenders of one kind.
    """
    _checked_uses(jaxpr, shards)
    names = [shard.param.name for shard in shards if shard.grad_buffer is not None]
    facts = gradient_flow(jaxpr, [v for v, _, kind in _inputs(jaxpr, shards) if kind])
    grads = dict(zip(names, facts, strict=False))
    _refuse_inner_derivatives(facts[len(names) :])
    _refuse_changed_gradients(grads)
    _check_ranks(jaxpr, shards, args, axes)
    return {n for n, fact in grads.items() if isinstance(fact, Grad) and fact.once}


def _inputs(
    jaxpr: core.Jaxpr, shards: Sequence[Shard]
) -> list[tuple[core.Var, Shard, bool]]:
    """Returns the inputs that belong to shards, and whether each is a `grad_buffer`."""
    marked = [
        (shard, is_grad_buffer)
        for shard in shards
        for part, is_grad_buffer in (
            (shard.value, 0),
            (shard.grad_buffer, 1),
            (shard.accumulated_grad, 0),
        )
        for _ in jax.tree.leaves(part)
    ]
    # The leaves of the shards are the first inputs; those of other arguments follow.
    pairs = zip(jaxpr.invars, marked, strict=False)
    return [(v, shard, bool(is_grad_buffer)) for v, (shard, is_grad_buffer) in pairs]


def _checked_uses(jaxpr: core.Jaxpr, shards: Sequence[Shard]) -> Uses:
    values: dict[core.Var, tuple[str, int]] = {}
    inputs = iter(jaxpr.invars)
    for shard in shards:
        # The first array of a quantized weight has its shape; the others are scales.
        value, *_ = [next(inputs) for _ in jax.tree.leaves(shard)]
        if shard.param.unit != ROOT:
            values[value] = shard.param.name, shard.param.ndim_in_unit
    uses = uses_of_shards(jaxpr, values)
    _refuse_misuse(uses)
    return uses


def _refuse_misuse(uses: Uses) -> None:
    if uses.misread:
        raise ValueError(
            f"loss_fn computes with {_listed(uses.misread)} outside of the unit, or "
            "returns it, where only this device's shard exists. Use a weight in its "
            "unit's __call__, mark the function that uses it with fsdp.unit or "
            "fsdp.scan, or leave it out of `units`. A penalty on weights belongs in "
            "the optimizer (weight_decay)."
        )
    if uses.rearranged:
        raise ValueError(
            f"loss_fn moves elements of {_listed(uses.rearranged)} (flip, roll, "
            "transpose, reshape, a part of a dim) outside of the unit, where only this "
            "device's shard exists. Do it inside the unit, where it is unsharded, "
            "or leave the parameter out of `units`."
        )
    if uses.cast:
        casts = {f"{name} to {dtype}" for name, dtype in uses.cast.items()}
        raise ValueError(
            f"loss_fn casts weights of units outside of these: {_listed(casts)}. A "
            "unit computes in the dtype of the plan's policy. Set FSDPConfig(mp_policy="
            "fsdp.MixedPrecisionPolicy(param_dtype=...)), which also halves what is "
            "gathered, or cast inside the unit."
        )


def _is_gradient(name: str, fact: Fact) -> bool:
    if isinstance(fact, Grad):
        return fact.name == name and fact.is_in_place
    return isinstance(fact, Constant) and fact.is_zero


def _refuse_changed_gradients(grads: Mapping[str, Fact]) -> None:
    changed = {name for name, fact in grads.items() if not _is_gradient(name, fact)}
    if changed:
        raise ValueError(
            f"A derivative rule in loss_fn (jax.custom_vjp) changes the gradient of "
            f"{_listed(changed)} outside of the unit, where it is already summed over "
            "ranks and only this device's piece exists. There it may be multiplied by "
            "a constant and added. Put the rule inside the unit, leave the parameter "
            "out of `units`, or change gradients in the optimizer (optax)."
        )


def _refuse_inner_derivatives(facts: Sequence[Fact]) -> None:
    names = {fact.name for fact in facts if isinstance(fact, Grad)}
    names = names.union(*(f.computed_from for f in facts if isinstance(f, Other)))
    if names:
        raise ValueError(
            f"loss_fn differentiates with respect to {_listed(names)} and uses the "
            "result, which outside of the unit is only this device's piece, summed "
            "over ranks. Call jax.grad inside a function that is a unit as a whole, or "
            "leave the parameter out of `units`."
        )


def _check_ranks(
    jaxpr: core.Jaxpr,
    shards: Sequence[Shard],
    args: Sequence[PyTree],
    axes: Sequence[str],
    *,
    is_split: bool = False,
) -> None:
    known = frozenset(axes)
    if not known:
        return
    # The batch and the key differ along the data axes, a shard along the axes that
    # split it; all other inputs are the same on all ranks.
    rows = known.intersection(DATA_AXES)
    of_shards = [_differs(shard) & known for _, shard, _ in _inputs(jaxpr, shards)]
    sizes = [len(jax.tree.leaves(arg)) for arg in args]
    state: list[Axes] = [frozenset()] * sizes[0]
    rest = [rows] * sum(sizes[1:3]) + [frozenset()] * sum(sizes[3:])
    while True:
        divided, results = divided_collectives(
            jaxpr,
            [*of_shards, *state, *rest],
            known,
            # Units gather in backward too, which a pipeline does not trace.
            is_unit=is_gather if is_split else lambda _: False,
        )
        # A microbatch begins with the state that the one before it left, which may
        # differ along more axes: repeat to a fixed point.
        left = results[len(results) - len(state) :]
        after = [a | b for a, b in zip(state, left, strict=True)]
        if after == state or divided:
            break
        state = after
    if divided:
        raise ValueError(_divided(divided))


def _differs(shard: Shard) -> Axes:
    """Returns the axes along which this device's piece of a parameter differs."""
    spec = shard.param.spec(shard.param.placements.parameter)
    return frozenset(jax.tree.leaves(tuple(spec)))


def _divided(divided: Sequence[Divided]) -> str:
    places = {
        f"{one.collective} over {', '.join(one.axes)} "
        + (f"of unit '{one.unit}' " if one.unit else "")
        + ("in a lax.while_loop" if one.kind == "while" else "in a lax.cond or switch")
        for one in divided
    }
    return (
        "loss_fn decides by this rank's rows or keys whether to run a collective, so "
        f"that ranks would wait for each other forever: {_listed(places)}. Run the "
        "unit always and choose among its results (jnp.where), or decide alike on all "
        "ranks, as by fsdp.ops.masked_count(flag) > 0. If ranks agree for a reason "
        "that the program does not show, declare it with "
        "fsdp.step.assume_replicated(predicate)."
    )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
