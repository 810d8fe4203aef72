"""A loop in a trace: what its operands and results are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan: the numbers of its operands and results.

    Attributes:
      eqn: Equation.
      num_consts: Number of constants, the first operands.
      num_carry: Number of arrays in the carry, the next operands and the first results.
    """

    eqn: Any
    num_consts: int
    num_carry: int

    @classmethod
    def of(cls, eqn: Any) -> Loop:
        """Returns the numbers of an equation whose primitive is `scan`."""
        # By rank, a slice having a dim less than its array, since jax 0.10 and 0.12
        # name the params differently.
        body = eqn.params["jaxpr"].jaxpr
        pairs = list(zip(eqn.invars, body.invars, strict=True))
        num_sliced = sum(_ndim(outer) > _ndim(inner) for outer, inner in pairs)
        results = zip(eqn.outvars, body.outvars, strict=True)
        num_carry = sum(_ndim(outer) == _ndim(inner) for outer, inner in results)
        return cls(eqn, len(pairs) - num_sliced - num_carry, num_carry)

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the constants, the carry and the arrays that are sliced."""
        first, last = self.num_consts, self.num_consts + self.num_carry
        given = list(operands)
        return given[:first], given[first:last], given[last:]


def _ndim(v: Any) -> int:
    return v.aval.ndim
