"""Number of units that are unsharded at once, by a compiled program's schedule.

A gathered weight is in memory from its all-gather to its last reader. A loop carries
the weights that it has gathered ahead, and passes them to what follows.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from fsdp_jax._scopes import PREFETCH, is_in
from fsdp_jax.audit._check_collectives import Key, key_of
from fsdp_jax.audit._check_resharding import VIEWS, result_of, size_of
from fsdp_jax.audit._expected import ExpectedCollective
from fsdp_jax.hlo._parse import Computation, Instruction, Module
from fsdp_jax.hlo._program import CommunicatedArray, Program
from fsdp_jax.sharding._plan import ROOT

Weight = tuple[str | None, Key]
"""Unit, None if XLA merged the gathers of several, and the form of one unsharded array.
"""

Sizes = Mapping[str, Mapping[Key, int]]
"""Unit -> how many of its weights have gathers of each form."""

Arrays = frozenset["_Array"]
"""Unsharded arrays."""

Carried = Mapping[int, Arrays]
"""Index in a tuple -> unsharded arrays that the element is, or is made of."""

_NONE: Arrays = frozenset()


@dataclasses.dataclass(frozen=True)
class Unsharded:
    """The schedule at the point at which most units are unsharded.

    Attributes:
      units: Number of units; several runs of a stack's unit count each.
      names: Their names, each once.
      instruction: Instruction that runs then; "" if no unit is gathered.
    """

    units: int = 0
    names: tuple[str, ...] = ()
    instruction: str = ""


def sizes_of(expected: Sequence[ExpectedCollective]) -> Sizes:
    """Returns how many matrices of each form a unit gathers, again in backward.

    Vectors are left out: they are small, and XLA may keep them.
    """
    sizes: dict[str, dict[Key, int]] = {}
    for planned in expected:
        param = planned.param
        is_kept = not param.unit_policy.reshard or param.unit == ROOT
        if planned.kind != "gather" or is_kept or param.ndim_in_unit < 2:
            continue
        own = sizes.setdefault(planned.param.unit, {})
        own[key_of(planned)] = own.get(key_of(planned), 0) + 1
    return sizes


def unsharded(
    program: Program,
    arrays: Sequence[CommunicatedArray],
    expected: Sequence[ExpectedCollective],
) -> Unsharded:
    """Returns how many units are unsharded at once, by the schedule of a program.

    Args:
      program: Scheduled program.
      arrays: All arrays that it communicates.
      expected: Collectives of the plan.
    """
    sizes = sizes_of(expected)
    gathers: dict[tuple[str, str], _Gather] = {}
    for one in arrays:
        # What a loop gathers ahead is in no order where XLA has inlined the loop.
        is_inlined = is_in(one.scope, PREFETCH) and not one.loops
        if one.op != "all-gather" or is_inlined:
            continue
        if _is_of_unit(one, sizes):
            place = one.computation.name, result_of(one).name
            own = gathers.setdefault(place, _Gather(one.instruction.name))
            own.weights.append((_unit(one, sizes), key_of(one)))
    module = program.module
    peak, _ = _Walk(module, gathers, sizes).peak(module[module.entry], {})
    names = dict.fromkeys(
        unit or _unit_of_form(key, sizes) for unit, key in peak.weights
    )
    return Unsharded(_count(peak.weights, sizes), tuple(names), peak.instruction)


def units_an_iteration(
    arrays: Sequence[CommunicatedArray], expected: Sequence[ExpectedCollective]
) -> int:
    """Returns the most units that one iteration of a loop gathers ahead; at least 1.

    Several if the loop's body enters several, or XLA or `unroll` has unrolled it.
    """
    sizes = sizes_of(expected)
    bodies: dict[str, collections.Counter[Weight]] = {}
    for one in arrays:
        if one.op != "all-gather" or not (one.loops and is_in(one.scope, PREFETCH)):
            continue
        if _is_of_unit(one, sizes):
            body = bodies.setdefault(one.computation.name, collections.Counter())
            body[_unit(one, sizes), key_of(one)] += 1
    return max([1, *(_count(weights, sizes) for weights in bodies.values())])


def _unit(one: CommunicatedArray, sizes: Sizes) -> str | None:
    """Returns the unit of a gather by its scope; None for none, or for several."""
    return one.unit if one.unit in sizes else None


def _is_of_unit(one: CommunicatedArray, sizes: Sizes) -> bool:
    """Returns whether a gather is of a unit's weight, by its scope or else its form."""
    unit = _unit(one, sizes)
    own = sizes.values() if unit is None else [sizes[unit]]
    return any(key_of(one) in forms for forms in own)


def _unit_of_form(key: Key, sizes: Sizes) -> str:
    return next(unit for unit, own in sizes.items() if key in own)


def _count(weights: Mapping[Weight, int], sizes: Sizes) -> int:
    """Returns the least number of units that have `weights` together."""
    units: dict[str, int] = {}
    for (unit, key), number in weights.items():
        if unit is not None:
            units[unit] = max(units.get(unit, 0), math.ceil(number / sizes[unit][key]))
    more = [0]
    for (unit, key), number in weights.items():
        if unit is None:
            # First as weights of units that have others here too.
            room = sum(count * sizes[one].get(key, 0) for one, count in units.items())
            room -= sum(n for (one, k), n in weights.items() if one and k == key)
            most = max(own.get(key, 0) for own in sizes.values())
            more.append(math.ceil(max(0, number - room) / most))
    return sum(units.values()) + max(more)


@dataclasses.dataclass
class _Gather:
    """An all-gather of a computation, found by the name of its result.

    Attributes:
      start: Name of the instruction that starts it.
      weights: Weights in the result.
    """

    start: str
    weights: list[Weight] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Array:
    """One unsharded array of a computation: a result of it, or carried by its loop."""

    weight: Weight
    origin: str
    number: int


@dataclasses.dataclass(frozen=True)
class _Peak:
    """Unsharded weights where a computation has most units, and the instruction."""

    weights: Mapping[Weight, int]
    instruction: str


@dataclasses.dataclass
class _Lives:
    """Unsharded arrays of a computation: where they are, and how long.

    Attributes:
      arrays: Name of an instruction -> arrays that its result is, or is made of.
      elements: Name of a tuple -> the same for its elements.
      born: Position in the schedule from which an array is in memory.
      last: Position of its last reader.
      inner: Name of a loop, call or conditional -> its own peak.
    """

    arrays: dict[str, Arrays] = dataclasses.field(default_factory=dict)
    elements: dict[str, Carried] = dataclasses.field(default_factory=dict)
    born: dict[_Array, int] = dataclasses.field(default_factory=dict)
    last: dict[_Array, int] = dataclasses.field(default_factory=dict)
    inner: dict[str, _Peak] = dataclasses.field(default_factory=dict)

    def read(self, one: Instruction) -> Arrays:
        """Returns the arrays that an instruction computes with; none for tuples."""
        if one.opcode in ("tuple", "get-tuple-element", "opt-barrier", "bitcast"):
            return _NONE
        return _NONE.union(
            *(self.arrays.get(name, _NONE) for name in one.operands),
            *(_all(self.elements.get(name, {})) for name in one.operands),
        )

    def at(self, position: int, one: Instruction) -> collections.Counter[Weight]:
        """Returns the weights that are unsharded while an instruction runs."""
        live = {
            array
            for array, born in self.born.items()
            if born <= position <= self.last.get(array, born)
        }
        found: collections.Counter[Weight] = collections.Counter()
        if nested := self.inner.get(one.name):
            live -= self.read(one)  # The nested computation has them.
            found.update(nested.weights)
        found.update(array.weight for array in live)
        return found


class _Walk:
    """Follows gathered weights through the schedule of computations."""

    def __init__(
        self, module: Module, gathers: Mapping[tuple[str, str], _Gather], sizes: Sizes
    ) -> None:
        self._module = module
        self._gathers = gathers
        self._sizes = sizes

    def peak(self, within: Computation, carried: Carried) -> tuple[_Peak, Carried]:
        """Returns the peak of a computation, and the weights in its result.

        Args:
          within: Computation.
          carried: Weights in the elements of its parameter.
        """
        lives = _Lives()
        places = {one.name: at for at, one in enumerate(within.instructions)}
        for at, one in enumerate(map(within.fused, within.instructions)):
            if gather := self._gathers.get((within.name, one.name)):
                lives.arrays[one.name] = made = _arrays(gather.weights, one.name)
                lives.born.update(dict.fromkeys(made, places[gather.start]))
            elif one.opcode == "parameter":
                lives.elements[one.name] = carried
                lives.born.update(dict.fromkeys(_all(carried), 0))
            elif one.opcode in ("while", "call", "conditional"):
                left = self._nested(one, lives)
                lives.elements[one.name] = left
                for array in _all(left):
                    lives.born.setdefault(array, at + 1)
            elif _writes_slice(self._module, one):
                lives.arrays[one.name] = made = _stacked(within, one, lives)
                lives.born.update(dict.fromkeys(made, at))
            else:
                _pass_on(within, one, lives)
            lives.last.update(dict.fromkeys(lives.read(one), at))
        result = lives.elements.get(within.root.name, {})
        lives.last.update(dict.fromkeys(_all(result), len(places)))
        return self._most(within, lives), result

    def _most(self, within: Computation, lives: _Lives) -> _Peak:
        best, most = _Peak({}, ""), 0
        begins = {*lives.born.values()}
        for at, one in enumerate(within.instructions):
            # Between these points weights only go.
            if at not in begins and one.name not in lives.inner:
                continue
            weights = lives.at(at, one)
            if (units := _count(weights, self._sizes)) > most:
                nested = lives.inner.get(one.name)
                where = (nested and nested.instruction) or one.name
                best, most = _Peak(weights, where), units
        return best

    def _nested(self, one: Instruction, lives: _Lives) -> Carried:
        """Notes the peak of a nested computation; returns the weights it leaves."""
        if one.opcode != "while":
            peaks = [self.peak(self._module[name], {})[0] for name in one.calls]
            lives.inner[one.name] = max(
                peaks, key=lambda peak: _count(peak.weights, self._sizes)
            )
            return {}
        body = self._module[one.calls[0]]
        given = lives.elements.get(one.operands[0], {})
        weights = {i: [x.weight for x in arrays] for i, arrays in given.items()}
        while True:
            inside = {i: _arrays(x, f"{body.name}.{i}") for i, x in weights.items()}
            lives.inner[one.name], result = self.peak(body, inside)
            after = {i: [x.weight for x in arrays] for i, arrays in result.items()}
            if after.keys() <= weights.keys():
                left = {i: _arrays(x, f"{one.name}.{i}") for i, x in weights.items()}
                return left | {i: given[i] for i in _kept(body) if i in given}
            weights = after | weights


def _pass_on(within: Computation, one: Instruction, lives: _Lives) -> None:
    """Notes what the result of an instruction holds of what it reads."""
    given = [lives.arrays.get(name, _NONE) for name in one.operands]
    if one.opcode == "tuple":
        lives.elements[one.name] = {i: x for i, x in enumerate(given) if x}
    elif one.opcode == "opt-barrier":
        lives.elements[one.name] = lives.elements.get(one.operands[0], {})
    elif one.opcode == "get-tuple-element":
        elements = lives.elements.get(one.operands[0], {})
        lives.arrays[one.name] = elements.get(one.index or 0, _NONE) | given[0]
    elif one.opcode in VIEWS or one.opcode == "fusion":
        # A fusion with as many elements as the weight may be the weight, converted.
        lives.arrays[one.name] = _NONE.union(
            *(
                arrays
                for name, arrays in zip(one.operands, given, strict=True)
                if arrays
                and (
                    one.opcode in VIEWS or size_of(within.by_name[name]) == size_of(one)
                )
            )
        )


def _writes_slice(module: Module, one: Instruction) -> bool:
    """Returns whether an instruction writes a slice of an array."""
    if one.opcode == "fusion":
        one = module[one.calls[0]].root
    return one.opcode == "dynamic-update-slice"


def _stacked(within: Computation, one: Instruction, lives: _Lives) -> Arrays:
    """Returns the weights in a stack that each iteration of a loop writes one into."""
    found: list[Weight] = []
    for name in one.operands:
        size = size_of(within.by_name[name]) or 1
        number, rest = divmod(size_of(one), size)
        if not rest and number > 1:
            own = lives.arrays.get(name, _NONE)
            found += [array.weight for array in own] * number
        elif number == 1 and (own := lives.arrays.get(name)):
            return own  # The stack itself, of which others have been written.
    return _arrays(found, one.name)


def _kept(body: Computation) -> list[int]:
    """Returns the elements of a loop's tuple that no iteration changes."""
    if body.root.opcode != "tuple":
        return []
    made = [body.by_name[name] for name in body.root.operands]
    return [
        i
        for i, one in enumerate(made)
        if (one.opcode, one.index) == ("get-tuple-element", i)
        and body.by_name[one.operands[0]].opcode == "parameter"
    ]


def _all(carried: Carried) -> Arrays:
    return _NONE.union(*carried.values())


def _arrays(weights: Sequence[Weight], origin: str) -> Arrays:
    return frozenset(_Array(weight, origin, i) for i, weight in enumerate(weights))
