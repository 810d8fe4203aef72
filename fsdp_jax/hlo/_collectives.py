"""Collectives of an HLO module, their replica groups and mesh axes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence

from jax.sharding import Mesh

from fsdp_jax._scopes import unit_of
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
"""Replica groups, each in ascending order; empty for one group of all devices."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a module, with one or more arrays.

    Attributes:
      op: Opcode without `-start`, e.g. `all-gather`.
      sent: Shapes of the array(s) that each device sends.
      received: Shapes of the array(s) that each device receives.
      groups: Replica groups.
      op_name: Path of the jax scopes in the metadata.
      name: Name of the instruction.
    """

    op: str
    sent: tuple[Shape, ...]
    received: tuple[Shape, ...]
    groups: Groups
    op_name: str
    name: str

    @property
    def group_size(self) -> int:
        """Devices in the largest group; 0 if empty, which is all devices."""
        return max(map(len, self.groups), default=0)

    @property
    def unit(self) -> str | None:
        """Innermost unit in the scopes; None if there is none."""
        return unit_of(self.op_name)


def collective_of(
    module: Module, computation: Computation, instruction: Instruction
) -> Collective | None:
    """Returns the collective that an instruction runs or starts, or None.

    Args:
      module: Module of the instruction.
      computation: Computation of the instruction.
      instruction: Instruction of the computation.
    """
    op = instruction.opcode.removesuffix("-start")
    # XLA wraps an asynchronous op without an opcode of its own in a computation.
    if instruction.opcode == "async-start":
        within = module[instruction.calls[0]]
        return collective_of(module, within, within.root)
    if op not in OPS:
        return None
    sent = tuple(
        shape
        for name in instruction.operands
        for shape in computation.by_name[name].shapes
    )
    if op == "ragged-all-to-all":  # Further operands are the output, offsets and sizes.
        sent = sent[:1]
    return Collective(
        op,
        sent,
        _received(computation, instruction, sent),
        _groups(instruction),
        instruction.op_name,
        instruction.name,
    )


def _received(
    computation: Computation, instruction: Instruction, sent: tuple[Shape, ...]
) -> tuple[Shape, ...]:
    """Returns the shapes of the result; of the `-done` if it is asynchronous."""
    if not instruction.opcode.endswith("-start"):
        return instruction.shapes
    for reader in computation.readers.get(instruction.name, []):
        if reader.opcode.endswith("-done"):
            return reader.shapes
    # A `-start` without `-done` returns a tuple of its operands and its results.
    return instruction.shapes[len(sent) :] or instruction.shapes


def axes_of(groups: Groups, mesh: Mesh) -> tuple[str, ...] | None:
    """Returns the mesh axes along which `groups` communicate, or None if along none.

    Groups of some of the ranks of a tp group count as `("tp",)`: XLA partitions `tp` by
    itself, and may split a dim with fewer elements than `tp` over a subset of the
    ranks. Those of some of the ranks of an ep group count as `("ep",)`: tokens are sent
    within nodes and between them.

    Args:
      groups: Replica groups of a program compiled for `mesh`.
      mesh: Device mesh; the program numbers its devices in row-major order.
    """
    shape = tuple(mesh.shape.items())
    axes = _groups_of_axes(shape).get(groups or None)
    if axes is None:
        within = (axis for axis in ("tp", "ep") if _are_within(groups, axis, shape))
        return next(((axis,) for axis in within), None)
    return axes


def _are_within(groups: Groups, axis: str, shape: tuple[tuple[str, int], ...]) -> bool:
    """Returns whether each group lies inside one group of the axis."""
    names = [name for name, _ in shape]
    if axis not in names or dict(shape)[axis] == 1:
        return False
    along = groups_along([size for _, size in shape], (names.index(axis),))
    owner = {device: group for group in along for device in group}
    return all(len({owner[device] for device in group}) == 1 for group in groups)


@functools.lru_cache(maxsize=32)
def _groups_of_axes(
    shape: tuple[tuple[str, int], ...],
) -> dict[Groups | None, tuple[str, ...]]:
    """Maps the replica groups of each set of axes to the axes; None maps to all."""
    # Axes of size 1 do not change the groups.
    used = [(axis, size) for axis, size in shape if size > 1]
    sizes = [size for _, size in used]
    found: dict[Groups | None, tuple[str, ...]] = {None: tuple(a for a, _ in used)}
    for count in range(1, len(used) + 1):
        for dims in itertools.combinations(range(len(used)), count):
            along = tuple(used[dim][0] for dim in dims)
            found[groups_along(sizes, dims)] = along
    return found


def groups_along(sizes: Sequence[int], dims: Sequence[int]) -> Groups:
    """Returns the groups of row-major device ids that differ in `dims` only.

    Args:
      sizes: Sizes of the mesh axes.
      dims: Positions of the axes along which a group lies.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(itertools.product(*map(range, sizes))):
        fixed = tuple(at for dim, at in enumerate(place) if dim not in dims)
        groups.setdefault(fixed, []).append(number)
    return frozenset(map(tuple, groups.values()))


def _groups(instruction: Instruction) -> Groups:
    """Parses the replica groups of a collective from any of XLA's notations."""
    text = instruction.attributes
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
    """Expands `[groups, size]<=[dims]T(order)`: an iota, transposed and reshaped."""
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
    """Merges source-target pairs into groups of connected devices."""
    group_of: dict[int, set[int]] = {}
    for source, target in ((int(a), int(b)) for a, b in pairs):
        merged = group_of.get(source, {source}) | group_of.get(target, {target})
        group_of.update(dict.fromkeys(merged, merged))
    return frozenset(tuple(sorted(group)) for group in group_of.values())
