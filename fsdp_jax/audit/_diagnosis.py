"""Finds the likely cause of a collective that the plan does not expect."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from fsdp_jax.audit._expected import ExpectedCollective
from fsdp_jax.audit._mismatch import (
    Difference,
    described,
    named_collectives,
    nearest,
    observed,
)
from fsdp_jax.hlo._program import CommunicatedArray, Dims
from fsdp_jax.sharding._plan import Plan


def diagnose(
    plan: Plan,
    one: CommunicatedArray,
    expected: Sequence[ExpectedCollective],
    missing: Sequence[ExpectedCollective],
) -> Difference:
    """Returns the difference between an unexpected array and the nearest expectation.

    Args:
      plan: Plan of the program.
      one: Array of an unexpected collective.
      expected: All expected collectives.
      missing: Expected collectives that the program does not run.
    """
    for suspect in _suspects(plan, one, expected, missing):
        unsharded = _unsharded_dims(one)
        alike = [
            (planned, dims)
            for planned in suspect.expected
            if (dims := suspect.seen(planned)) and _sorted(dims) == _sorted(unsharded)
        ]
        # Dims in this very order are stronger evidence than permuted ones.
        exact = [
            planned for planned, dims in alike if dims == unsharded and one.is_in_order
        ]
        if found := exact or [planned for planned, _ in alike]:
            (planned, *_) = nearest(found, one)
            return Difference(
                named_collectives(found, one),
                described(planned),
                observed(one),
                suspect.fix,
            )
    return Difference(
        f"{one.op} in {one.scope.strip('/') or 'no scope'}",
        "nothing of the kind",
        observed(one),
        "look for a psum, pmean or all_gather in the loss or around the step; the "
        "plan's gradients are summed without one",
    )


@dataclasses.dataclass(frozen=True)
class _Suspect:
    """A kind of deviation from the plan.

    Attributes:
      expected: Expected collectives that may deviate in this way.
      seen: Function from an expected collective to the dims of its unsharded side under
        this deviation; None if it cannot deviate so.
      fix: Likely fix.
    """

    expected: Sequence[ExpectedCollective]
    seen: Callable[[ExpectedCollective], Dims | None]
    fix: str


def _suspects(
    plan: Plan,
    one: CommunicatedArray,
    expected: Sequence[ExpectedCollective],
    missing: Sequence[ExpectedCollective],
) -> list[_Suspect]:
    """Returns the kinds of deviation, the likelier first."""
    is_gather, axes = one.op == "all-gather", set(one.axes or ())
    same_op = [planned for planned in expected if planned.op == one.op]
    same_axes = [planned for planned in same_op if set(planned.axes) == axes]
    other_axes = [planned for planned in same_op if set(planned.axes) != axes]
    in_units = [planned for planned in same_op if planned.kind in ("gather", "reduce")]
    of_other_op = [x for x in missing if (x.op == "all-gather") == is_gather]
    return [
        _Suspect(
            same_axes,
            functools.partial(_at_full_width, plan.mesh.shape["tp"]),
            "tp was lost on the way: the weight is moved at full width, tp times the "
            "bytes; the collective has to be manual over tp too",
        ),
        _Suspect(
            same_op,
            functools.partial(_of_all_experts, plan.mesh.shape["ep"]),
            "experts of all ranks on ep are gathered: compute with a rank's "
            "own, and send it the tokens (fsdp_jax.ops.expert_parallel_dispatch)",
        ),
        _Suspect(
            other_axes,
            lambda planned: planned.unsharded,
            "make the step with this plan, its mesh and its placements",
        ),
        _Suspect(
            in_units,
            _as_a_stack,
            "gather unit by unit, with fsdp.scan over the stack; nothing outside of "
            "the unit may need its unsharded weights; where a vmap runs all of the "
            "stack at once, make the module around the vmap the unit",
        ),
        _Suspect(
            of_other_op,
            lambda planned: planned.unsharded,
            "make the step with this plan: its strategy, placements and "
            "MixedPrecisionPolicy",
        ),
    ]


def _at_full_width(tp: int, planned: ExpectedCollective) -> Dims | None:
    """Returns the dims of a weight that tp does not split."""
    dim = planned.param.split.tensor_dim
    return None if dim is None or tp == 1 else _times(planned, dim, tp)


def _of_all_experts(ep: int, planned: ExpectedCollective) -> Dims | None:
    """Returns the dims of a weight with the experts of all ranks."""
    dim = planned.param.split.expert_dim
    return None if dim is None else _times(planned, dim, ep)


def _times(planned: ExpectedCollective, dim: int, ranks: int) -> Dims:
    """Returns the unsharded dims, of which one is `ranks` times as large."""
    dims = list(planned.unsharded)
    dims[dim - (len(planned.param.shape) - len(dims))] *= ranks
    return tuple(dims)


def _as_a_stack(planned: ExpectedCollective) -> Dims | None:
    """Returns the dims of all layers of a stack at once."""
    stack = planned.param.shape[: planned.param.num_stacked]
    return (*stack, *planned.unsharded) if stack else None


def _unsharded_dims(one: CommunicatedArray) -> Dims:
    return one.received if one.op == "all-gather" else one.sent


def _sorted(dims: Dims) -> Dims:
    return tuple(sorted(d for d in dims if d != 1))
