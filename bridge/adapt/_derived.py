"""Derived tensors: what a layer needs that no layout can say, in both directions.

Rules permute and cut, and so return every bit. Three things that a layer may need are
more than that, and live here instead, seen by a rule as one more tensor of the source:
a kernel turned around (`jnp.flip`), rows that must be zero because the other side has
no place for them, and, where it is asked for by name, the sum of two biases.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from bridge._box import Box, Range, as_index, complete
from bridge.formats._source import Source

Read = Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Term:
    """A tensor of the source, or an equal share of its rows.

    Args:
      tensor: Its name.
      part: Which share of dim 0.
      parts: How many shares there are.
      flip: Dims along which it is turned around.
    """

    tensor: str
    part: int = 0
    parts: int = 1
    flip: tuple[int, ...] = ()

    def shape(self, source: Source) -> tuple[int, ...]:
        """Shape of the share."""
        rows, *rest = source.shape(self.tensor)
        return (rows // self.parts, *rest)

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads a box of the share."""
        shape = self.shape(source)
        ranges = list(box)
        for dim in self.flip:
            start, stop = ranges[dim]
            ranges[dim] = Range(shape[dim] - stop, shape[dim] - start)
        first = self.part * shape[0]
        ranges[0] = Range(ranges[0].start + first, ranges[0].stop + first)
        return np.flip(source.read(self.tensor, as_index(tuple(ranges))), self.flip)


@dataclasses.dataclass(frozen=True)
class Derived:
    """One tensor as a rule sees it, and the tensors of the source behind it.

    Args:
      name: What rules call it.
      terms: Summed in their dtype. On the way back the first is the whole value, and
        the others are zero.
      zeros: What must be zero, of the same shape: it is lost otherwise.

    Raises:
      ValueError: If a name holds a `{layer}`: sums and flips are not stacked.
    """

    name: str
    terms: tuple[Term, ...]
    zeros: tuple[Term, ...] = ()

    def __post_init__(self):
        """Refuses patterns."""
        if "{" in self.name:
            raise ValueError(
                f"'{self.name}' is derived from other tensors, and those are not "
                "stacked over '{...}': write one adapter for each layer."
            )

    @property
    def used(self) -> tuple[Term, ...]:
        """All terms, zeros included."""
        return self.terms + self.zeros

    def split(self, value: np.ndarray) -> list[tuple[Term, np.ndarray]]:
        """Returns the value of each term that gives this value."""
        first, *rest = self.used
        return [(first, np.flip(value, first.flip))] + [
            (term, np.zeros_like(value)) for term in rest
        ]


@dataclasses.dataclass(frozen=True)
class DerivedSource:
    """A source with some tensors in the place of those they are derived from.

    Args:
      source: Where the tensors lie.
      derived: What takes their place.
    """

    source: Source
    derived: dict[str, Derived]

    @property
    def name(self) -> str:
        """Where the tensors come from."""
        return self.source.name

    def keys(self) -> tuple[str, ...]:
        """Names of all tensors; a derived one only if all it needs is there."""
        given = set(self.source.keys())
        used = {
            term.tensor for derived in self.derived.values() for term in derived.used
        }
        kept = [key for key in self.source.keys() if key not in used]
        return (*kept, *[k for k, d in self.derived.items() if _needs(d) <= given])

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        if key not in self.derived:
            return self.source.shape(key)
        return self.derived[key].terms[0].shape(self.source)

    def dtype(self, key: str) -> np.dtype:
        """Dtype of one tensor."""
        if key not in self.derived:
            return self.source.dtype(key)
        return self.source.dtype(self.derived[key].terms[0].tensor)

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a tensor, or the box of it that `slices` says."""
        if key not in self.derived:
            return self.source.read(key, slices)
        box = complete(slices, self.shape(key))
        first, *rest = self.derived[key].terms
        value = first.read(self.source, box)
        for term in rest:
            value = value + term.read(self.source, box)
        return value


def derive(
    source: Source, derived: Sequence[Derived], *, check_zeros: bool = True
) -> DerivedSource:
    """Puts derived tensors in the place of those behind them.

    Args:
      source: Where the tensors lie.
      derived: What takes their place.
      check_zeros: Read what must be zero; False where no value is wanted.

    Raises:
      ValueError: If terms of one sum differ in shape or dtype, or what must be zero is
        not; all of them are listed.
    """
    given = set(source.keys())
    whole = [d for d in derived if _needs(d) <= given]
    wrong = [line for d in whole for line in _unlike(d, source)]
    if check_zeros and not wrong:
        wrong = [line for d in whole for line in _nonzero(d, source)]
    if wrong:
        raise ValueError(f"'{source.name}' cannot be adapted:\n" + "\n".join(wrong))
    return DerivedSource(source, {d.name: d for d in derived})


def underive(
    tensors: dict[str, np.ndarray], derived: Sequence[Derived]
) -> dict[str, np.ndarray]:
    """Takes derived tensors apart again.

    Args:
      tensors: As rules see them.
      derived: Which of them are derived, and from what.

    Returns:
      The tensors of the source; the ones that a rule sees as they are, first.
    """
    tensors = dict(tensors)
    parts: dict[str, dict[int, np.ndarray]] = {}
    for entry in derived:
        for term, value in entry.split(tensors.pop(entry.name)):
            parts.setdefault(term.tensor, {})[term.part] = value
    joined = {
        key: np.concatenate([shares[part] for part in sorted(shares)])
        for key, shares in parts.items()
    }
    return tensors | joined


def _needs(derived: Derived) -> set[str]:
    return {term.tensor for term in derived.used}


def _unlike(derived: Derived, source: Source) -> list[str]:
    first = derived.terms[0]
    expected = first.shape(source), source.dtype(first.tensor)
    return [
        f"  {term.tensor} is {found[1]} of shape {found[0]}, {first.tensor} is "
        f"{expected[1]} of shape {expected[0]}: they cannot become one tensor"
        for term in derived.used
        if (found := (term.shape(source), source.dtype(term.tensor))) != expected
    ]


def _nonzero(derived: Derived, source: Source) -> list[str]:
    wrong = []
    for term in derived.zeros:
        shape = term.shape(source)
        value = term.read(source, tuple(Range(0, size) for size in shape))
        if value.any():
            rows = "" if term.parts == 1 else f", part {term.part} of {term.parts},"
            wrong.append(
                f"  {term.tensor}{rows} is not zero, and the tree has no place for "
                f"it beside {derived.terms[0].tensor}"
            )
    return wrong
