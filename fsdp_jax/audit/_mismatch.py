"""One difference between a program and its plan, with its wording."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fsdp_jax._report import Grid
from fsdp_jax.audit._expected import ExpectedCollective
from fsdp_jax.hlo._program import CommunicatedArray, Dims
from fsdp_jax.sharding._plan import ROOT, ParamPlan


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference between a program and its plan.

    Attributes:
      subject: Parameters with their unit, or the collective.
      plan: Value in the plan.
      program: Value in the program.
      fix: Likely fix.
    """

    subject: str
    plan: str
    program: str
    fix: str

    def __str__(self) -> str:
        """Returns the difference as one line of the error."""
        return (
            f"{self.subject}: the plan says {self.plan}; the program {self.program}. "
            f"Likely fix: {self.fix}."
        )


def difference_grid(differences: Sequence[Difference]) -> Grid:
    """Returns the differences as a table."""
    headers = ("of", "the plan says", "the program", "likely fix")
    return Grid(
        dict.fromkeys(headers, "text"),
        [(one.subject, one.plan, one.program, one.fix) for one in differences],
    )


def array(dtype: str, dims: Dims) -> str:
    """Formats an array as HLO does, e.g. `bf16[8,128]`."""
    return f"{dtype}[{','.join(map(str, dims))}]"


def over(axes: Sequence[str] | None) -> str:
    """Formats mesh axes, e.g. "over dp_shard x cp"."""
    return "over " + " x ".join(axes) if axes else "along no axes of the mesh"


def described(planned: ExpectedCollective) -> str:
    """Formats an expected collective."""
    often = {"enter": ", once a step", "deferred": ", once a step"}.get(
        planned.kind, ""
    )
    sent = array(planned.dtype, planned.sent)
    sides = f"{sent} to {array(planned.dtype, planned.received)}"
    if planned.op == "all-reduce":
        sides = sent
    return f"{planned.op} of {sides} {over(planned.axes)}{often}"


def observed(one: CommunicatedArray) -> str:
    """Formats a collective of the program."""
    sides = f"{array(one.dtype, one.sent)} to {array(one.dtype, one.received)}"
    if one.op == "all-reduce":
        sides = array(one.dtype, one.sent)
    where = f"{one.times} a step" + (", in a loop" if one.loops else "")
    return f"has {one.op} of {sides} {over(one.axes)} ({where})"


def nearest(
    found: Sequence[ExpectedCollective], one: CommunicatedArray
) -> list[ExpectedCollective]:
    """Returns the expected collectives nearest to `one`: of its unit, with its dims."""
    wanted = ROOT if one.unit == "root" else one.unit
    found = [planned for planned in found if planned.param.unit == wanted] or list(
        found
    )
    if not one.is_in_order:
        return found
    sides = (one.sent, one.received)
    exact = [
        planned
        for planned in found
        if planned.sent in sides or planned.received in sides
    ]
    return exact or found


def named(params: Sequence[ParamPlan]) -> str:
    """Formats parameters by the first one's name and unit, and the number of others."""
    params = list(dict.fromkeys(params))
    more = f" or {len(params) - 1} more" if len(params) > 1 else ""
    return f"'{params[0].name}'{more} (unit '{params[0].unit}')"


def named_collectives(
    found: Sequence[ExpectedCollective], one: CommunicatedArray
) -> str:
    """Formats the parameters that `one` most likely holds."""
    return named([planned.param for planned in nearest(found, one)])
