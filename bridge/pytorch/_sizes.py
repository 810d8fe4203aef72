"""Sizes of the dims that one rule names, settled from shapes.

A family's config gives the sizes of all its rules. A rule that someone wrote for a
model of their own has shapes on its two sides, and those settle nearly every dim:
`"(heads head_dim) embed -> embed heads head_dim"` is all said by the leaf.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bridge.pytorch._spoken import matching
from bridge.rules._layout import Side
from bridge.rules._rules import Rule

Shapes = Mapping[str, tuple[int, ...]]
Sizes = dict[str, int]


class Equation(NamedTuple):
    """Says that products of sizes add up: of the parts along a dim, else of one.

    Args:
      terms: The factors of each product.
      total: The size of the dim.
      subject: The dim, for messages.
    """

    terms: tuple[tuple[str, ...], ...]
    total: int
    subject: str


def settle(
    rule: Rule, tensors: Shapes, leaves: Shapes, given: Mapping[str, int]
) -> tuple[Sizes, list[str]]:
    """Settles what can be, and says what contradicts itself.

    Args:
      rule: The rule.
      tensors: Shapes of the source by name; what is missing teaches nothing.
      leaves: Shapes of the tree by path; likewise.
      given: Sizes that someone has said, by name.

    Returns:
      The sizes, and a line for each shape that the rule does not fit. A dim that
      nothing settles is in neither.
    """
    sizes = {name: given[name] for name in rule.dims if name in given}
    equations, wrong = _equations(rule, tensors, leaves)
    while not wrong and (found := _next(equations, sizes)):
        sizes |= found
    wrong = wrong or [
        f"{e.subject} is {e.total}, but {_text(e, sizes)} is {_value(e, sizes)} by "
        "the other shapes of the rule"
        for e in equations
        if _known(e, sizes) and _value(e, sizes) != e.total
    ]
    return sizes, wrong


def _equations(
    rule: Rule, tensors: Shapes, leaves: Shapes
) -> tuple[list[Equation], list[str]]:
    """Returns what the shapes say, and the shapes that have another number of dims."""
    stacked = tuple((name,) for name in re.findall(r"\{(\w+)\}", rule.sources[0]))
    sources = [layout.source for layout in rule.layouts]
    destinations = [layout.destination for layout in rule.layouts]
    equations, wrong = [], []
    for names, sides, outer, shapes in (
        (rule.sources, sources, (), tensors),
        (rule.destinations, destinations, stacked, leaves),
    ):
        for number, pattern in enumerate(names):
            # A side with one name holds all parts of the other, end to end.
            parts = sides if len(names) == 1 else [sides[number]]
            for name in matching(pattern, shapes):
                expected = len(outer) + len(parts[0])
                if len(shapes[name]) == expected:
                    equations += _of_shape(name, shapes[name], parts, outer, rule.dim)
                else:
                    dims = " ".join(map(_group, outer + parts[0]))
                    wrong.append(
                        f"{name} has shape {shapes[name]}, and the rule {expected} "
                        f"dims: {dims}"
                    )
    return equations, wrong


def _of_shape(
    name: str, shape: tuple[int, ...], parts: Sequence[Side], stacked: Side, dim: int
) -> Iterator[Equation]:
    for position, size in enumerate(shape):
        subject = f"dim {position} of {name}, of shape {shape},"
        own = position - len(stacked)
        if own < 0:
            yield Equation((stacked[position],), size, subject)
        elif own == dim:
            yield Equation(tuple(part[own] for part in parts), size, subject)
        else:
            yield from (Equation((part[own],), size, subject) for part in parts)


def _next(equations: list[Equation], sizes: Sizes) -> Sizes:
    """Returns a size that follows from those known, or nothing."""
    for equation in equations:
        unknown = {n for term in equation.terms for n in term if n not in sizes}
        if len(unknown) != 1:
            continue
        (name,) = unknown
        slope = sum(
            math.prod(sizes[n] for n in term if n != name)
            for term in equation.terms
            if name in term
        )
        fixed = sum(
            math.prod(sizes[n] for n in term)
            for term in equation.terms
            if name not in term
        )
        # What does not divide is left to be reported, with the size rounded down.
        if slope:
            return {name: max(0, equation.total - fixed) // slope}
    return {}


def _known(equation: Equation, sizes: Sizes) -> bool:
    return all(name in sizes for term in equation.terms for name in term)


def _value(equation: Equation, sizes: Sizes) -> int:
    return sum(math.prod(sizes[name] for name in term) for term in equation.terms)


def _text(equation: Equation, sizes: Sizes) -> str:
    return " + ".join(
        " x ".join(f"{name}={sizes[name]}" for name in term) for term in equation.terms
    )


def _group(dim: tuple[str, ...]) -> str:
    return dim[0] if len(dim) == 1 else f"({' '.join(dim)})"
