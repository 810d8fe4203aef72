"""Data types of a traced program, reduced to what memory and FLOP counts need."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

MOVE = "move_over_tp"
"""Operation that changes the layout of an array over `tp`."""

ZEROS = "zeros"
"""Operation that broadcasts a zero."""

SLICE = "slice_over_tp"
"""Operation that takes each rank's part of an array replicated over `tp`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """An array of a traced program; compared by identity.

    Attributes:
      shape: Dims on one device.
      dtype: Dtype.
      is_on_host: Whether it is in host memory, as residuals offloaded for backward are.
    """

    shape: tuple[int, ...]
    dtype: Any
    is_on_host: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of device memory; 0 on the host."""
        if self.is_on_host:
            return 0
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Operation:
    """One equation of a traced program, with calls inlined.

    Attributes:
      name: Name of the primitive.
      inputs: Operands; None for literals.
      outputs: Results.
      scopes: jax's named scopes around it.
      params: Parameters of the primitive.
      bodies: Nested programs: the body of a loop, the branches of a conditional.
      carry: Start and end of a loop's carry among the inputs.
    """

    name: str
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    scopes: str
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bodies: tuple[Program, ...] = ()
    carry: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function.

    Attributes:
      inputs: Arguments, with closed-over constants first.
      outputs: Results; None for a literal.
      operations: Operations in the order of the trace.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    operations: tuple[Operation, ...]
