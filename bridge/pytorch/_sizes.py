"""Inference of a rule's dim sizes from shapes.

A family's config gives the sizes of all its rules. For a rule written for another
model they are inferred from the shapes on its two sides, which determine nearly every
dim: for `"(heads head_dim) embed -> embed heads head_dim"` the leaf's shape suffices.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bridge.pytorch._covered import matching
from bridge.rules._layout import Side
from bridge.rules._rules import Rule

Shapes = Mapping[str, tuple[int, ...]]
Sizes = dict[str, int]


class Equation(NamedTuple):
    """Equation `sum(prod(sizes of a term)) == total` for one dim of a shape.

    There is one term per part along the dim of concatenation, else a single term.

    Args:
      terms: Names of the factors of each product.
      total: Size of the dim.
      subject: Description of the dim, for messages.
    """

    terms: tuple[tuple[str, ...], ...]
    total: int
    subject: str


def settle(
    rule: Rule, tensors: Shapes, leaves: Shapes, given: Mapping[str, int]
) -> tuple[Sizes, list[str]]:
    """Infers the sizes of a rule's dims, and finds contradictions.

    Args:
      rule: Rule whose dims are inferred.
      tensors: Tensor shapes of the source by name; may be incomplete.
      leaves: Leaf shapes of the tree by path; may be incomplete.
      given: Sizes that are known, by name.

    Returns:
      Inferred sizes by name, and one message for each shape that contradicts the rule.
      A dim that cannot be inferred is in neither.
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
    """Returns the equations of all shapes, and messages for those of wrong rank."""
    stacked = tuple((name,) for name in re.findall(r"\{(\w+)\}", rule.sources[0]))
    sources = [layout.source for layout in rule.layouts]
    destinations = [layout.destination for layout in rule.layouts]
    equations, wrong = [], []
    for names, sides, outer, shapes in (
        (rule.sources, sources, (), tensors),
        (rule.destinations, destinations, stacked, leaves),
    ):
        for number, pattern in enumerate(names):
            # A side with one name is the concatenation of all parts of the other.
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
    """Returns one size that follows from the known ones, or an empty dict."""
    for equation in equations:
        unknown = {n for term in equation.terms for n in term if n not in sizes}
        if len(unknown) != 1:
            continue
        (name,) = unknown
        # The unknown is in every term or in some: total = slope * unknown + fixed.
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
        # If it does not divide, the size is rounded down; the caller then reports it.
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
