"""`scan`: runs a stack of identical units in a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import jax

from fsdp_jax._scopes import AS_WRITTEN, unit_scope
from fsdp_jax._tree import PyTree
from fsdp_jax.lora._composed_weight import take_parts
from fsdp_jax.sharding._attributes import closed_over_tracers
from fsdp_jax.sharding._plan import ParamPlan
from fsdp_jax.step._constant_leaves import without_constants
from fsdp_jax.step._layer_stack import scan_stages, unless_padding
from fsdp_jax.step._module_units import (
    changed_since,
    put_state,
    values_of,
    written_state,
)
from fsdp_jax.step._prefetch import prefetching_scan
from fsdp_jax.step._shard import Shard, partition, shards_of
from fsdp_jax.step._static_runs import (
    StaticRun,
    check_static,
    choices_of,
    join_runs,
    num_units,
    part_of,
    runs_in_chunk,
    static_runs,
    switched,
)
from fsdp_jax.step._unit import is_unit
from fsdp_jax.step._unit import unit as mark


def scan(
    unit: Callable[..., tuple[PyTree, PyTree]],
    stacked: PyTree,
    carry: PyTree,
    xs: tuple[PyTree, ...] = (),
    consts: tuple[PyTree, ...] = (),
    *,
    prefetch: int | None = None,
    unroll: int = 1,
    static: Sequence[Hashable] | None = None,
) -> tuple[PyTree, PyTree]:
    """Runs `unit` over a stack of weights, gathering one slice of the stack at a time.

    Where `pp` splits the stack, each pipeline stage runs the units that it holds, see
    `fsdp_jax.PipelineConfig`.

    Args:
      unit: Function `unit(weights, carry, *x_slices, *consts) -> (carry, y)`, where
        `weights` is one unsharded slice of `stacked`.
      stacked: Weights of all units, with a leading dim `layers` on every array. Leaves
        that are not arrays (a rate, a function) are given to every unit as they are.
      carry: Tree passed from unit to unit.
      xs: Trees with the same leading dim, one slice of each per unit, e.g. keys.
      consts: Trees passed to every unit as they are, e.g. rope tables. Arrays with
        respect to which the result is differentiated enter here, not by a closure.
      prefetch: Distance from the unit that computes to the one being gathered, in
        units, forward and backward, so that the gather overlaps with the computation.
        Also reduces each unit's gradients while the next unit computes.
        `prefetch + 1` units are unsharded at a time, and above 1 XLA copies one of
        them. 0 gathers a unit at its entry. Default `FSDPConfig(prefetch=)`; a model
        with several stacks may give one of small units a larger distance here. Has no
        effect on units that are objects in a slice (the layers of a period), since all
        of a slice may be too large: these are gathered one after the other.
      unroll: Units in one iteration of the compiled loop; more take more memory.
      static: Value of each unit that is known when it is traced, such as a flag or a
        function: hashable, and given to the unit as `unit(..., static=value)`. Units
        with equal values in a row are one compiled loop; gathers go on from one loop
        to the next. Pipeline stages are one program: where the units at one place of
        their chunks differ, a unit chooses as it runs, and saves for backward what
        any of its variants would. None for units without that argument.

    Returns:
      The last carry, and the `y`s stacked on a new leading dim. State that nnx modules
      in `stacked` write (BatchNorm statistics, dropout counters) is updated in place.

    Raises:
      ValueError: If `unit` closes over a traced value, `xs` or `consts` is not a tuple,
        `prefetch` or `unroll` is out of range, `static` has not a value for each unit,
        or the stack cannot be prefetched or split over `pp`.

    Examples:
      >>> def features(model, batch):
      ...     x, _ = fsdp.scan(layer, model["layers"], batch["x"])
      ...     return x
      >>> fsdp.make_forward(plan, features)(params, batch).shape
      (8, 16)
    """
    for name, value in (("xs", xs), ("consts", consts)):
        if not isinstance(value, tuple):
            raise ValueError(
                f"fsdp.scan({name}=...) takes a tuple of trees, got a "
                f"{type(value).__name__}: write {name}=({name},)."
            )
    if caught := sorted(set(closed_over_tracers(unit))):
        raise ValueError(
            f"The unit given to fsdp.scan closes over traced value(s): "
            f"{', '.join(caught)}. A unit takes what it computes with by its "
            "arguments: pass it in `consts` (same for every unit) or `xs` (one slice "
            "each)."
        )
    if (prefetch or 0) < 0 or unroll < 1:
        raise ValueError(
            f"fsdp.scan({prefetch=}, {unroll=}): prefetch must be at least 0, and "
            "unroll at least 1."
        )

    run = functools.partial(_scan, prefetch=prefetch, unroll=unroll)
    staged = [s for s in partition(stacked)[0] if s.param.is_staged]
    runs = None
    if static is not None:
        units = staged[0].param.shape[0] if staged else num_units(stacked)
        check_static(static, units)
        if len(runs := static_runs(static)) == 1:
            unit, runs = functools.partial(unit, static=static[0]), None
    if staged:
        param, several = staged[0].param, static if runs else None
        return _scan_stages(run, param, unit, several, stacked, carry, xs, consts)
    return run(unit, stacked, carry, xs, consts, runs=runs)


def _pair(made: Any) -> tuple[PyTree, PyTree]:
    """Returns what a unit made, if it is a carry and a `y`."""
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(
            f"The unit given to fsdp.scan returns a {type(made).__name__}, and not "
            "(carry, y): return (x, None) to stack nothing."
        )
    return made


def _scan_stages(
    run: Callable[..., tuple[PyTree, PyTree]],
    param: ParamPlan,
    unit: Callable[..., tuple[PyTree, PyTree]],
    static: Sequence[Hashable] | None,
    stacked: PyTree,
    carry: PyTree,
    xs: tuple[PyTree, ...],
    consts: tuple[PyTree, ...],
) -> tuple[PyTree, PyTree]:
    """Traces the scan for a pipeline, whose stages run some of the layers at a time."""
    if jax.tree.leaves(written_state(stacked)):
        raise ValueError(
            f"'{param.unit}' holds arrays that are not parameters (dropout counters, "
            "statistics of a BatchNorm), which its layers may write to, and is split "
            "over pp, where several microbatches are under way at once. Pass keys in "
            "`xs`, or use pp=1."
        )
    shards, others, merge = partition(stacked)
    if static is not None:
        unit, xs = switched(unit), (choices_of(static), *xs)

    def run_chunk(shards, others, carry, xs, consts, is_real):
        chunk, layer = merge(shards, others), unit
        if is_real is not None:  # Else no stage has padding layers.
            layer, xs = unless_padding(layer), (is_real, *xs)
        runs = None
        if static is not None:
            runs = runs_in_chunk(static, num_units(shards))
            if len(runs) == 1:
                layer, runs = functools.partial(layer, static=runs[0].value), None
        return run(layer, chunk, carry, xs, consts, runs=runs)

    layers = param.shape[0]
    return scan_stages(run_chunk, shards, others, carry, xs, consts, num_layers=layers)


def _scan(
    unit: Callable[..., tuple[PyTree, PyTree]],
    stacked: PyTree,
    carry: PyTree,
    xs: tuple[PyTree, ...],
    consts: tuple[PyTree, ...],
    *,
    prefetch: int | None,
    unroll: int,
    runs: Sequence[StaticRun] | None = None,
) -> tuple[PyTree, PyTree]:
    def stateful(weights, *args, **static):
        before = values_of(written_state(weights))
        carry, y = _pair(unit(weights, *args, **static))
        # Dropout counters and BatchNorm statistics leave the loop as stacked outputs.
        return carry, (y, changed_since(before, written_state(weights)))

    own, others, merge = partition(stacked)
    is_alone = _holds_units_alone(stacked)
    rest = (others, carry, xs, consts)
    if ahead := 0 if is_alone else _ahead(own, rest, prefetch, runs):

        def compute(weights, others, carry, xs, consts, **static):
            return stateful(merge(weights, others), carry, *xs, *consts, **static)

        given = (carry, (others, xs), consts)
        carry, (ys, written) = _prefetched(compute, own, *given, ahead, unroll, runs)
    else:
        as_asked = jax.named_scope(AS_WRITTEN) if prefetch == 0 else nullcontext()
        with as_asked:
            carry, (ys, written) = _looped(
                stateful, stacked, carry, xs, consts, unroll, runs
            )
    put_state(stacked, written)
    return carry, ys


def _looped(
    unit: Callable[..., tuple[PyTree, PyTree]],
    stacked: PyTree,
    carry: PyTree,
    xs: tuple[PyTree, ...],
    consts: tuple[PyTree, ...],
    unroll: int,
    runs: Sequence[StaticRun] | None,
) -> tuple[PyTree, PyTree]:
    """Runs a loop over units that gather at their entry; one for each of `runs`."""
    arrays, whole = without_constants(stacked)

    def loop(unit, arrays, carry, xs):
        gathering = mark(unit)

        def body(carry, slices):
            arrays, x = slices
            return gathering(whole(arrays), carry, *x, *consts)

        return jax.lax.scan(body, carry, (arrays, xs), unroll=unroll)

    if runs is None:
        return loop(unit, arrays, carry, xs)
    made = []
    for run in runs:
        own = functools.partial(unit, static=run.value)
        part, x = part_of((arrays, xs), run)
        carry, out = loop(own, part, carry, x)
        made.append(out)
    return carry, join_runs(made)


def _holds_units_alone(stacked: PyTree) -> bool:
    """Returns whether all parameters belong to objects that gather their own."""
    return not partition(stacked, lambda n: is_unit(n) and n is not stacked)[0]


def _prefetched(
    compute: Callable[..., tuple[PyTree, PyTree]],
    own: list[Shard],
    carry: PyTree,
    slices: tuple[PyTree, PyTree],
    consts: PyTree,
    prefetch: int,
    unroll: int,
    runs: Sequence[StaticRun] | None,
) -> tuple[PyTree, PyTree]:
    """Runs `compute(weights, others, carry, xs, consts)` over a stack, gathered ahead.

    `slices` are its `(others, xs)`.
    """
    # A LoRA or quantized weight is made of several shards: gather these.
    computed, parts, keys = take_parts(compute, own)
    others, xs = slices
    arrays, whole = without_constants(others)

    def of_parts(parts, carry, slices, consts, **static):
        keys, arrays, xs = slices
        return computed(parts, keys, whole(arrays), carry, xs, consts, **static)

    # The scope that `call_unit` opens on the other path: reports read it.
    with unit_scope(parts[0].param.unit):
        return prefetching_scan(
            of_parts,
            parts,
            carry,
            (keys, arrays, xs),
            consts,
            prefetch=prefetch,
            unroll=unroll,
            runs=runs,
        )


def _ahead(
    own: list[Shard],
    rest: PyTree,
    prefetch: int | None,
    runs: Sequence[StaticRun] | None,
) -> int:
    """Returns how many units this scan gathers ahead itself.

    Unless a call asks for a number, `prefetch_scans` finds the loop and replaces it.
    Stages of a pipeline run their layers where that does not see them, and several
    loops over one stack are none that it replaces.
    """
    if prefetch is not None:
        _check_prefetch(own, rest, prefetch)
        return prefetch if own else 0
    is_own = own and (own[0].param.is_staged or runs) and not _problem(own, rest)
    return own[0].param.unit_policy.prefetch if is_own else 0


def _check_prefetch(own: list[Shard], rest: PyTree, prefetch: int) -> None:
    """Refuses a stack whose units cannot be gathered ahead, as the call asks."""
    if prefetch and own and (problem := _problem(own, rest)):
        raise ValueError(
            f"fsdp.scan(prefetch=...) cannot gather '{own[0].param.unit}' ahead: "
            f"{problem}. Use prefetch=0."
        )


def _problem(own: list[Shard], rest: PyTree) -> str | None:
    """Returns why the units of a stack cannot be gathered ahead; None if they can."""
    if not own[0].param.unit_policy.reshard:
        return (
            "reshard_after_forward=False keeps all weights, so that backward has "
            "nothing to gather"
        )
    if any(s.param.num_stacked != 1 or s.num_stacked != 1 for s in own):
        return "it is a stack of more dims than one, or was planned as no stack"
    if inner := shards_of(rest):
        return f"it has units within, such as '{inner[0].param.unit}'"
    return None
