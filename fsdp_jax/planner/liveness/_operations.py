"""What a traced program is made of, as far as memory and work ask."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

MOVE = "move_over_tp"
"""The operation that brings an array from one layout over `tp` into another."""

SLICE = "slice_over_tp"
"""That which takes each rank's part of what all of them have."""


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """An array of a traced program, by identity.

    Attributes:
      shape: Its dims on one device.
      dtype: Its dtype.
      is_on_host: Whether it is none of the device's, as what is offloaded for backward.
    """

    shape: tuple[int, ...]
    dtype: Any
    is_on_host: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of it on one device."""
        if self.is_on_host:
            return 0
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Operation:
    """One equation of a traced program; what is called is inlined.

    Attributes:
      name: Of the primitive.
      inputs: What it reads; constants are left out.
      outputs: What it makes.
      scopes: jax's named scopes around it.
      params: Of the primitive.
      bodies: The programs within: of a loop its body, of a condition its branches.
      carry: Of a loop, where among the inputs its carry begins and ends.
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
      inputs: Its arguments, closed-over constants first.
      outputs: Its results; None for a literal.
      operations: In the order of the trace.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    operations: tuple[Operation, ...]
