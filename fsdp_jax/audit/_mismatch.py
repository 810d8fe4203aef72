"""One difference between a program and its plan, with its wording."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fsdp_jax._report import Grid
from fsdp_jax.audit._expected import Leg
from fsdp_jax.hlo._collectives import Dims, Moved
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


def says(leg: Leg) -> str:
    """Formats an expected collective."""
    often = {"enter": ", once a step", "late": ", once a step"}.get(leg.kind, "")
    sides = f"{array(leg.dtype, leg.sent)} to {array(leg.dtype, leg.received)}"
    if leg.op == "all-reduce":
        sides = array(leg.dtype, leg.sent)
    return f"{leg.op} of {sides} {over(leg.axes)}{often}"


def does(one: Moved) -> str:
    """Formats a collective of the program."""
    sides = f"{array(one.dtype, one.sent)} to {array(one.dtype, one.received)}"
    if one.op == "all-reduce":
        sides = array(one.dtype, one.sent)
    where = f"{one.times} a step" + (", in a loop" if one.loops else "")
    return f"has {one.op} of {sides} {over(one.axes)} ({where})"


def nearest(found: Sequence[Leg], one: Moved) -> list[Leg]:
    """Returns the expected collectives nearest to `one`: of its unit, with its dims."""
    wanted = ROOT if one.unit == "root" else one.unit
    found = [leg for leg in found if leg.row.unit == wanted] or list(found)
    if not one.is_in_order:
        return found
    sides = (one.sent, one.received)
    exact = [leg for leg in found if leg.sent in sides or leg.received in sides]
    return exact or found


def named(rows: Sequence[ParamPlan]) -> str:
    """Formats parameters by the first one's name and unit, and the number of others."""
    rows = list(dict.fromkeys(rows))
    more = f" or {len(rows) - 1} more" if len(rows) > 1 else ""
    return f"'{rows[0].name}'{more} (unit '{rows[0].unit}')"


def named_legs(found: Sequence[Leg], one: Moved) -> str:
    """Formats the parameters that `one` most likely holds."""
    return named([leg.row for leg in nearest(found, one)])
