"""The collectives of a program: what, in which dtype and shape, in which loop."""

from __future__ import annotations

import dataclasses
import math
import re

_OPS = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"
_OP = re.compile(rf"= (\(.*?\)|\S+) ({_OPS})(?:-start)?\((.*)$")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_STABLEHLO = re.compile(r'"stablehlo\.(all_gather|reduce_scatter|all_reduce)"')
_TYPE = re.compile(r"-> tensor<([0-9x]*)([a-z]+[0-9]+)>")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operand of one collective of a compiled module.

    Attributes:
      op: E.g. `all-gather`.
      dtype: E.g. `f32`.
      shape: The result's shape on one device.
      body: The loop body it stands in, or None.
      groups: Who takes part, as the module writes it.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    body: str | None
    groups: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def collectives(text: str) -> list[Collective]:
    """Every operand of every collective in an HLO module's text."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    found, computation = [], None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            computation = header[1]
        if match := _OP.search(line):
            body = computation if computation in bodies else None
            groups = re.search(r"replica_groups=(\S+?),? ", match[3] + " ")
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                shape = tuple(int(d) for d in dims.split(",") if d)
                found.append(
                    Collective(
                        match[2], dtype, shape, body, groups[1] if groups else ""
                    )
                )
    return found


def stablehlo_dtypes(text: str, op: str) -> set[str]:
    """The dtypes that cross the wire in all `op`s of a StableHLO module.

    Before any backend touched it: the CPU backend widens bfloat16 collectives.
    """
    dtypes = set()
    for part in re.split(rf'(?="stablehlo\.{op}")', text)[1:]:
        dtypes.add(re.search(r"-> tensor<(?:\d+x)*(\w+)>", part)[1])
    return dtypes
