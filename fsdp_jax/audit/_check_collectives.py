"""Compares a program's collectives with the plan's expected collectives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax

from fsdp_jax._scopes import CONTEXT_PARALLEL, MODEL_STATE, is_in, is_of_optimizer
from fsdp_jax.audit._diagnosis import diagnose
from fsdp_jax.audit._expected import ExpectedCollective
from fsdp_jax.audit._mismatch import (
    Difference,
    array,
    described,
    named,
    named_collectives,
    nearest,
    observed,
    over,
)
from fsdp_jax.hlo._concatenated import parts_of
from fsdp_jax.hlo._program import CommunicatedArray, Dims, Program
from fsdp_jax.sharding._batch_norm import SYNC_SCOPES
from fsdp_jax.sharding._mesh import DATA_AXES, axes_in_use
from fsdp_jax.sharding._plan import Plan

Key = tuple[str, frozenset[str], Dims, Dims]
"""Opcode, axes, and the dims of both sides sorted by size."""


def key_of(one: CommunicatedArray | ExpectedCollective) -> Key:
    """Returns a key that is equal for equal collectives in any layout chosen by XLA."""
    axes = frozenset(one.axes or ("?",))
    if one.op == "all-to-all":  # XLA reshapes it freely; both sides have equal sizes.
        size = (math.prod(one.sent),)
        return one.op, axes, size, size
    return one.op, axes, canonical(one.sent), canonical(one.received)


def canonical(dims: Dims) -> Dims:
    """Returns the dims sorted by size, without those of size 1."""
    return tuple(sorted(d for d in dims if d != 1))


def matches(
    one: CommunicatedArray, expected: Sequence[ExpectedCollective]
) -> list[ExpectedCollective]:
    """Returns the expected collectives that `one` may be, in any dtype."""
    exact = [planned for planned in expected if key_of(planned) == key_of(one)]
    if exact or len(one.sent) < 2:  # A 1-d array may be several concatenated ones.
        return exact
    # XLA may merge dims, which preserves the number of elements.
    op, axes, _, _ = key_of(one)
    sizes = math.prod(one.sent), math.prod(one.received)
    return [
        planned
        for planned in expected
        if key_of(planned)[:2] == (op, axes)
        and (math.prod(planned.sent), math.prod(planned.received)) == sizes
    ]


def check_collectives(
    plan: Plan,
    program: Program,
    arrays: Sequence[CommunicatedArray],
    expected: Sequence[ExpectedCollective],
) -> Iterator[Difference]:
    """Yields differences in dtype, axes, size and number of runs."""
    booked: dict[Key, list[CommunicatedArray]] = {}
    merged: dict[frozenset[str], list[CommunicatedArray]] = {}
    in_other_dtype: list[CommunicatedArray] = []
    strange: list[CommunicatedArray] = []
    for one in (
        part for whole in arrays for part in _judged_parts(plan, program, whole)
    ):
        if not _is_judged(program, one):
            continue
        # Expected collectives first: a small gradient must not pass as a metric.
        found = matches(one, expected)
        if found:
            booked.setdefault(key_of(found[0]), []).append(one)
            if not program.is_cpu and one.dtype not in {
                planned.dtype for planned in found
            }:
                in_other_dtype.append(one)
        elif _is_small(plan, one) or is_dispatch(plan, one):
            continue
        elif may_be_merged(program, one):
            merged.setdefault(frozenset(one.axes or ()), []).append(one)
        else:
            strange.append(one)
    for one in _together(in_other_dtype):
        yield _in_other_dtype(one, matches(one, expected))
    missing = [planned for planned in expected if key_of(planned) not in booked]
    for one in _together(strange):
        yield diagnose(plan, one, expected, missing)
    yield from _too_often(booked, expected)
    for axes, found in merged.items():
        yield from _merged_too_much(plan, axes, found, booked, expected)


def _judged_parts(
    plan: Plan, program: Program, one: CommunicatedArray
) -> Iterator[CommunicatedArray]:
    """Yields an array without its parts of the optimizer and of batch statistics."""
    parts = list(parts_of(program.module, one))
    rest = [
        part
        for part in parts
        if not is_of_optimizer(part.scope) and not _is_of_batch_norm(plan, part)
    ]
    if len(rest) == len(parts):
        yield one if len(parts) > 1 else parts[0]
    elif rest:
        size = (sum(part.elements for part in rest),)
        yield dataclasses.replace(rest[0], sent=size, received=size)


def _together(arrays: Sequence[CommunicatedArray]) -> list[CommunicatedArray]:
    """Merges equal arrays: XLA peels first or last iterations off a loop."""
    alike: dict[tuple[object, ...], CommunicatedArray] = {}
    for one in arrays:
        key = (one.op, one.dtype, one.sent, one.received, one.axes, one.unit)
        had = alike.get(key)
        alike[key] = one
        if had:
            times = had.times + one.times
            alike[key] = dataclasses.replace(
                one, times=times, loops=had.loops or one.loops
            )
    return list(alike.values())


def _is_judged(program: Program, one: CommunicatedArray) -> bool:
    """Returns whether `one` is along data axes, of parameters or of the loss."""
    is_data = one.axes is None or bool(set(one.axes) & set(DATA_AXES))
    # What XLA has merged has the scope of one of its parts.
    is_of_state = is_in(one.scope, MODEL_STATE) and not may_be_merged(program, one)
    return is_data and not (is_of_state or is_of_optimizer(one.scope))


def is_dispatch(plan: Plan, one: CommunicatedArray) -> bool:
    """Returns whether `one` holds tokens to or from experts, or their counts.

    No expected collective matches these, since a plan has no token counts.
    """
    widths = {
        size for param in plan.param_plans if param.is_expert for size in param.shape
    }
    widths |= {size // plan.mesh.shape["tp"] for size in widths}
    if one.axes != ("ep",) or not widths:
        return False
    if one.op == "all-reduce":
        return one.dtype == "s32"
    if one.op == "all-to-all" and one.dtype == "u8":
        return True  # Tokens in float8; no gradient is sent in bytes.
    is_of_tokens = len(one.sent) == 1 or (
        len(one.sent) == 2 and one.sent[-1] in {1, *widths}
    )
    return one.op == "ragged-all-to-all" or (one.op == "all-to-all" and is_of_tokens)


def is_context(one: CommunicatedArray) -> bool:
    """Returns whether `one` holds tokens over `cp`: keys, values, borders of chunks."""
    return one.axes == ("cp",) and any(
        is_in(one.scope, name) for name in CONTEXT_PARALLEL
    )


def _is_small(plan: Plan, one: CommunicatedArray) -> bool:
    """Returns whether `one` all-reduces metrics, amaxes, statistics or model state.

    Statistics are those of synchronized batch norm.
    """
    if one.op != "all-reduce":
        return False
    if _is_of_batch_norm(plan, one):
        return True
    state = {canonical(leaf.shape) for leaf in jax.tree.leaves(plan.model_state)}
    return one.elements <= _small(plan) or canonical(one.sent) in state


def _is_of_batch_norm(plan: Plan, one: CommunicatedArray) -> bool:
    return plan.config.sync_batch_norm and any(
        name in one.scope for name in SYNC_SCOPES
    )


def _small(plan: Plan) -> int:
    """Returns the maximum elements of metrics: 4 per parameter, and 64 for `aux`."""
    return 64 + 4 * len(plan.param_plans)


def may_be_merged(program: Program, one: CommunicatedArray) -> bool:
    """Returns whether XLA for GPUs may have concatenated arrays into `one`."""
    is_compiled_for_gpus = not (program.is_lowered or program.is_cpu)
    return one.op == "all-reduce" and len(one.sent) == 1 and is_compiled_for_gpus


def _in_other_dtype(
    one: CommunicatedArray, found: Sequence[ExpectedCollective]
) -> Difference:
    option = "param_dtype" if one.op == "all-gather" else "grad_comm_dtype"
    return Difference(
        named_collectives(found, one),
        described(nearest(found, one)[0]),
        observed(one),
        f"MixedPrecisionPolicy({option}=...) of the plan that the step was made with; "
        "cast before the collective, not behind it",
    )


def _too_often(
    booked: dict[Key, list[CommunicatedArray]], expected: Sequence[ExpectedCollective]
) -> Iterator[Difference]:
    """Yields the once-per-step collectives that run more often."""
    for key, found in booked.items():
        own = [planned for planned in expected if key_of(planned) == key]
        allowed = [planned.most for planned in own]
        times = sum(one.times for one in found)
        # None: a unit may be used any number of times.
        if None in allowed or times <= sum(most or 0 for most in allowed):
            continue
        if found[0].op == "all-reduce" and found[0].elements == 1:
            continue  # Scalars cannot be told from the loss and the gradient norm.
        looped = sum(one.times for one in found if one.loops)
        params = list(dict.fromkeys(planned.param for planned in own))
        units = sum(math.prod(param.shape[: param.num_stacked]) for param in params)
        yield Difference(
            named_collectives(own, found[0]),
            f"{described(nearest(own, found[0])[0])} ({units} of this shape)",
            f"does so {times} times a step, {looped} of them in loops: in each "
            "microbatch",
            "let make_train_step(num_microbatches=...) run the microbatches, with the "
            "strategy or placements of this plan",
        )


def _merged_too_much(
    plan: Plan,
    axes: frozenset[str],
    found: Sequence[CommunicatedArray],
    booked: dict[Key, list[CommunicatedArray]],
    expected: Sequence[ExpectedCollective],
) -> Iterator[Difference]:
    """Compares concatenated all-reduces by number of elements and dtype.

    Concatenation drops the names and the dims of the arrays.
    """
    own = [x for x in expected if x.op == "all-reduce" and frozenset(x.axes) == axes]
    allowed: dict[str, int] = {}
    for planned in own:
        size = (planned.most or 1) * math.prod(planned.sent)
        # The expectations for a unit and for the whole stack are alternatives.
        allowed[planned.param.name] = max(size, allowed.get(planned.param.name, 0))
    state = sum(leaf.size for leaf in jax.tree.leaves(plan.model_state))
    most = sum(allowed.values()) + state + _small(plan)
    keys = {key_of(planned) for planned in own}
    counted = [one for key in keys for one in booked.get(key, ())]
    sent = sum(one.times * one.elements for one in [*counted, *found])
    dtypes = {one.dtype for one in found}
    wrong = dtypes - {planned.dtype for planned in own}
    in_use = axes_in_use(plan.mesh, plan.mesh.axis_names)
    where = over([axis for axis in in_use if axis in axes])
    if sent > most:
        loops = " in loops" if any(one.loops for one in found) else ""
        yield Difference(
            f"all-reduces {where}",
            f"gradients of at most {sum(allowed.values()):,} elements a step"
            if allowed
            else "none but of scalars",
            f"sends {sent:,} elements{loops}, the largest as "
            f"{array(found[0].dtype, max(one.sent for one in found))}",
            "look for a psum or pmean in the loss, and for gradients that are reduced "
            "in every microbatch",
        )
    elif own and wrong:
        yield Difference(
            named([planned.param for planned in own]),
            described(own[0]),
            f"has all-reduces in {', '.join(sorted(wrong))} {where}",
            "MixedPrecisionPolicy(grad_comm_dtype=...) of the plan that the step was "
            "made with",
        )
