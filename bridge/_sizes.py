"""Sizes of the dims that one rule names, settled from shapes.

A family's config gives the sizes of all its rules. A rule that someone wrote for a
model of their own has shapes on its two sides, and those settle nearly every dim:
`"(heads head_dim) embed -> embed heads head_dim"` is all said by the leaf.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from bridge._layout import Side
from bridge._rules import Rule

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
      tensors: Shape of each tensor of the source; those that are missing teach nothing.
      leaves: Shape of each leaf of the tree.
      given: Sizes that someone has said, by name.

    Returns:
      The sizes, and a line for each shape that the rule does not fit. A dim that
      nothing settles is in neither.
    """
    sizes = {name: given[name] for name in rule.dims if name in given}
    equations, wrong = [], []
    for side in _sides(rule, tensors, leaves):
        try:
            equations += list(side)
        except ValueError as error:
            wrong.append(str(error))
    while not wrong and (found := _next(equations, sizes)):
        sizes |= found
    wrong += [
        f"{e.subject} is {e.total}, but {_text(e, sizes)} is {_value(e, sizes)} by "
        "the other shapes of the rule"
        for e in equations
        if not wrong and _known(e, sizes) and _value(e, sizes) != e.total
    ]
    return sizes, wrong


def _sides(rule: Rule, tensors: Shapes, leaves: Shapes) -> Iterator[Iterable[Equation]]:
    captures = re.findall(r"\{(\w+)\}", rule.sources[0])
    first = {name: 0 for name in captures}
    sources = [name.format(**first) for name in rule.sources]
    layouts = rule.layouts
    yield from _side(
        rule, sources, [layout.source for layout in layouts], tensors, (), rule.sources
    )
    stacked = tuple((name,) for name in captures)
    sides = [layout.destination for layout in layouts]
    names = rule.destinations
    yield from _side(rule, names, sides, leaves, stacked, names)


def _side(
    rule: Rule,
    names: Iterable[str],
    sides: list[Side],
    shapes: Shapes,
    stacked: Side,
    labels: tuple[str, ...],
) -> Iterator[Iterable[Equation]]:
    """Yields what each tensor, or leaf, says; where there is one, its parts add up."""
    names = list(names)
    joined = len(names) == 1
    for number, (name, label) in enumerate(zip(names, labels, strict=True)):
        parts = sides if joined else [sides[number]]
        if name in shapes:
            yield _of_shape(label, shapes[name], parts, stacked, rule.dim)


def _of_shape(
    name: str, shape: tuple[int, ...], parts: list[Side], stacked: Side, dim: int
) -> Iterator[Equation]:
    expected = len(stacked) + len(parts[0])
    if len(shape) != expected:
        sides = " ".join(_group(d) for d in stacked + parts[0])
        raise ValueError(
            f"{name} has shape {shape}, the rule says {expected} dims: {sides}"
        )
    for position, size in enumerate(shape):
        subject = f"dim {position} of {name}, of shape {shape},"
        if position < len(stacked):
            yield Equation((stacked[position],), size, subject)
            continue
        own = position - len(stacked)
        cut = own == dim and len(parts) > 1
        terms = tuple(part[own] for part in (parts if cut else parts[:1]))
        yield Equation(terms, size, subject)


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
