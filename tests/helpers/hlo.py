"""The collectives of a program: what, in which dtype and shape, in which loop."""

from __future__ import annotations

import dataclasses
import math
import re

_OPS = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"
_OP = re.compile(rf"= (\(.*?\)|\S+) ({_OPS})(?:-start)?\((.*)$")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operand of one collective of a compiled module.

    Attributes:
      op: E.g. `all-gather`.
      dtype: E.g. `f32`.
      shape: The result's shape on one device.
      loops: The bodies of the loops around it, innermost first.
      groups: Who takes part, as the module writes it.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    loops: tuple[str, ...]
    groups: str

    @property
    def body(self) -> str | None:
        """The loop body it stands in, or None."""
        return self.loops[0] if self.loops else None

    @property
    def depth(self) -> int:
        """How many loops are around it."""
        return len(self.loops)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def collectives(text: str) -> list[Collective]:
    """Every operand of every collective in an HLO module's text."""
    parents = _parents(text)
    found, computation = [], ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            computation = header[1]
        if match := _OP.search(line):
            loops = _loops(computation, parents)
            groups = re.search(r"replica_groups=(.*?)(, \w+=[^(]|$)", match[3])
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                shape = tuple(int(d) for d in dims.split(",") if d)
                found.append(
                    Collective(
                        op=match[2],
                        dtype=dtype,
                        shape=shape,
                        loops=tuple(loops),
                        groups=groups[1] if groups else "",
                    )
                )
    return found


def loops_around_loops(text: str) -> set[str]:
    """Bodies of the loops that have a loop within: those over microbatches."""
    parents = _parents(text)
    bodies = [name for name, (_, is_body) in parents.items() if is_body]
    return {outer for body in bodies for outer in _loops(body, parents)[1:]}


def group_size(groups: str) -> int:
    """How many devices take part together, in any of the ways that XLA writes it."""
    if iota := re.match(r"\[\d+,(\d+)\]<=", groups):
        return int(iota[1])
    if named := re.match(r"mesh\[(.*?)\].* \{(.*)\}", groups):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    first = re.match(r"\{\{([\d,]+)\}", groups)
    assert first, groups
    return len(first[1].split(","))


def stablehlo_dtypes(text: str, op: str) -> set[str]:
    """The dtypes communicated by all `op`s of arrays in a StableHLO module.

    Before any backend touched it: the CPU backend widens bfloat16 collectives.
    """
    dtypes = set()
    for part in re.split(rf'(?="stablehlo\.{op}")', text)[1:]:
        result = re.search(r"-> tensor<((?:\d+x)*)(\w+)>", part)
        assert result, part[:200]
        if result[1]:  # Scalars are losses and norms.
            dtypes.add(result[2])
    return dtypes


def _parents(text: str) -> dict[str, tuple[str, bool]]:
    """Computation -> (the one that calls it, whether as a loop body)."""
    parents, computation = {}, ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            computation = header[1]
        for kind, name in re.findall(r"(body|to_apply|calls)=%?([\w.\-]+)", line):
            parents[name] = (computation, kind == "body")
    return parents


def _loops(computation: str, parents: dict[str, tuple[str, bool]]) -> list[str]:
    """The loop bodies around a computation, innermost first."""
    loops = []
    while computation in parents:
        caller, is_body = parents[computation]
        if is_body:
            loops.append(computation)
        computation = caller
    return loops
