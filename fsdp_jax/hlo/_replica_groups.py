"""What a compiled module sends between devices, and among which."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from jax.sharding import Mesh

from fsdp_jax.hlo._parse import Computation, Instruction, Module, Shape

OPS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

Groups = frozenset[tuple[int, ...]]
"""Who talks to whom: each group in ascending order; empty means all together."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a module; several arrays may travel in it together.

    Attributes:
      op: E.g. `all-gather`.
      sent: The array(s) that each device gives.
      received: The array(s) that each device gets.
      groups: Who takes part.
      op_name: The path of jax's scopes that it comes from.
      name: Of the instruction.
    """

    op: str
    sent: tuple[Shape, ...]
    received: tuple[Shape, ...]
    groups: Groups
    op_name: str
    name: str

    @property
    def group_size(self) -> int:
        """Devices that talk to each other; 0 if the module says "all"."""
        return max(map(len, self.groups), default=0)

    @property
    def unit(self) -> str | None:
        """The unit whose parameters it moves, if it moves those of one."""
        found = re.findall(r"unit:([^/()]+)", self.op_name)
        return found[-1] if found else None


def collective_of(
    module: Module, computation: Computation, one: Instruction
) -> Collective | None:
    """The collective that `one` is, or starts; None if it does neither."""
    op = one.opcode.removesuffix("-start")
    if one.opcode == "async-start":
        within = module[one.calls[0]]
        return collective_of(module, within, within.root)
    if op not in OPS:
        return None
    sent = tuple(
        shape for name in one.operands for shape in computation.by_name[name].shapes
    )
    if op == "ragged-all-to-all":  # The others are what is written into, and sizes.
        sent = sent[:1]
    return Collective(
        op, sent, _received(computation, one, sent), _groups(one), one.op_name, one.name
    )


def _received(
    computation: Computation, one: Instruction, sent: tuple[Shape, ...]
) -> tuple[Shape, ...]:
    """The result; that of an asynchronous one stands where it is waited for."""
    if not one.opcode.endswith("-start"):
        return one.shapes
    for reader in computation.readers.get(one.name, []):
        if reader.opcode.endswith("-done"):
            return reader.shapes
    return one.shapes[len(sent) :] or one.shapes


def walk(module: Module) -> Iterator[tuple[Computation, Instruction, int, int]]:
    """Every instruction that runs, where, how often, and in how many loops.

    A loop whose number of iterations is unknown counts as one iteration. What is within
    fusions is not shown.
    """
    yield from _walk(module, module[module.entry], 1, 0)


def _walk(module: Module, computation: Computation, times: int, depth: int):
    for one in computation.instructions:
        yield computation, one, times, depth
        if one.opcode == "while":
            body = module[one.calls[0]]
            yield from _walk(module, body, times * (one.trip_count or 1), depth + 1)
        elif one.opcode in ("call", "conditional"):
            for name in one.calls:
                yield from _walk(module, module[name], times, depth)


def axes_of(groups: Groups, mesh: Mesh) -> tuple[str, ...] | None:
    """The mesh axes along which `groups` lie; None if along none.

    Those among some ranks of a tp group count as along tp: what is split over it is
    left to XLA, which may split dims of fewer elements over a part of it.

    Args:
      groups: Of a collective of a program that was compiled for `mesh`.
      mesh: The mesh, whose devices the program numbers in row-major order.
    """
    axes = _groups_of_axes(tuple(mesh.shape.items())).get(groups or None)
    if axes is None and _are_within(groups, mesh.shape.get("tp", 1)):
        return ("tp",)
    return axes


def _are_within(groups: Groups, tp: int) -> bool:
    """Whether each group has devices of one tp group alone; tp is the last axis."""
    return tp > 1 and all(len({device // tp for device in g}) == 1 for g in groups)


@functools.lru_cache(maxsize=32)
def _groups_of_axes(
    shape: tuple[tuple[str, int], ...],
) -> dict[Groups | None, tuple[str, ...]]:
    """Groups -> the axes they lie along, for all sets of axes; None -> all axes."""
    used = [(axis, size) for axis, size in shape if size > 1]
    sizes = [size for _, size in used]
    found: dict[Groups | None, tuple[str, ...]] = {None: tuple(a for a, _ in used)}
    for count in range(1, len(used) + 1):
        for dims in itertools.combinations(range(len(used)), count):
            along = tuple(used[dim][0] for dim in dims)
            found[groups_along(sizes, dims)] = along
    return found


def groups_along(sizes: Sequence[int], dims: Sequence[int]) -> Groups:
    """The groups of row-major device numbers that differ on `dims` of `sizes` alone."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(itertools.product(*map(range, sizes))):
        fixed = tuple(at for dim, at in enumerate(place) if dim not in dims)
        groups.setdefault(fixed, []).append(number)
    return frozenset(map(tuple, groups.values()))


def _groups(one: Instruction) -> Groups:
    """The groups of a collective, in any of the ways that XLA writes them."""
    text = one.attributes
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text):
        return _rings(re.findall(r"\{(\d+),(\d+)\}", pairs[1]))
    found = re.search(r"replica_groups=(.*?)(?:, \w+=|$)", text)
    return _read_groups(found[1]) if found else frozenset()


@functools.lru_cache(maxsize=256)
def _read_groups(text: str) -> Groups:
    if named := re.match(r"mesh\[(.*?)\].*?\{(.*)\}", text):
        axes = re.findall(r"'(\w+)'=(\d+)", named[1])
        wanted = re.findall(r"'(\w+)'", named[2])
        dims = [dim for dim, (axis, _) in enumerate(axes) if axis in wanted]
        return groups_along([int(size) for _, size in axes], dims)
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _read_iota(*iota.groups())
    return frozenset(
        tuple(sorted(map(int, group.split(","))))
        for group in re.findall(r"\{([\d,]+)\}", text)
    )


def _read_iota(shape: str, reshape: str, transpose: str | None) -> Groups:
    """`[groups, size]<=[dims]T(order)`: a row-major iota, transposed and reshaped."""
    dims = [int(d) for d in reshape.split(",")]
    order = [int(d) for d in transpose.split(",")] if transpose else range(len(dims))
    strides = [math.prod(dims[d + 1 :]) for d in range(len(dims))]
    numbers = [
        sum(at * strides[dim] for at, dim in zip(place, order, strict=True))
        for place in itertools.product(*(range(dims[dim]) for dim in order))
    ]
    size = int(shape.split(",")[-1])
    return frozenset(
        tuple(sorted(numbers[i : i + size])) for i in range(0, len(numbers), size)
    )


def _rings(pairs: Sequence[tuple[str, str]]) -> Groups:
    """The devices that are connected by pairs of a sender and a receiver."""
    group_of: dict[int, set[int]] = {}
    for source, target in ((int(a), int(b)) for a, b in pairs):
        merged = group_of.get(source, {source}) | group_of.get(target, {target})
        group_of.update(dict.fromkeys(merged, merged))
    return frozenset(tuple(sorted(group)) for group in group_of.values())
