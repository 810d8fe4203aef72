"""Derived tensors: invertible conversions that a layout cannot express.

Rules only permute and slice, which is bit-exact. Three conversions need more, and
appear to a rule as an additional tensor of the source: a flipped kernel (`jnp.flip`),
rows that must be zero because the destination has no place for them, and, where
explicitly requested, the sum of two biases.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from bridge._box import Box, Range, as_index, complete
from bridge.formats._source import Source

Read = Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Term:
    """Tensor of the source, or one of several equal parts of its dim 0.

    Args:
      tensor: Name of the tensor.
      part: Index of the part along dim 0.
      parts: Number of parts.
      flip: Dims along which the part is flipped.
    """

    tensor: str
    part: int = 0
    parts: int = 1
    flip: tuple[int, ...] = ()

    def shape(self, source: Source) -> tuple[int, ...]:
        """Returns the shape of the part."""
        rows, *rest = source.shape(self.tensor)
        return (rows // self.parts, *rest)

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads a box of the part."""
        shape = self.shape(source)
        ranges = list(box)
        # A box of the flipped part is a mirrored box of the stored tensor.
        for dim in self.flip:
            start, stop = ranges[dim]
            ranges[dim] = Range(shape[dim] - stop, shape[dim] - start)
        first = self.part * shape[0]
        ranges[0] = Range(ranges[0].start + first, ranges[0].stop + first)
        return np.flip(source.read(self.tensor, as_index(tuple(ranges))), self.flip)


@dataclasses.dataclass(frozen=True)
class Derived:
    """Tensor as seen by a rule, and the source tensors it is computed from.

    Args:
      name: Name used by rules.
      terms: Terms that are summed in their dtype. On export the first receives the
        full value, and the others are zero.
      zeros: Terms of the same shape that must be zero, as their values are dropped.

    Raises:
      ValueError: If `name` contains a `{layer}`: sums and flips cannot be stacked.
    """

    name: str
    terms: tuple[Term, ...]
    zeros: tuple[Term, ...] = ()

    def __post_init__(self):
        """Rejects names that are patterns."""
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
        """Returns each term with its value: the first has all of it, others zeros."""
        first, *rest = self.used
        return [(first, np.flip(value, first.flip))] + [
            (term, np.zeros_like(value)) for term in rest
        ]


@dataclasses.dataclass(frozen=True)
class DerivedSource:
    """Source in which derived tensors replace those they are computed from.

    Args:
      source: Source of the original tensors.
      derived: Derived tensors by name.
    """

    source: Source
    derived: dict[str, Derived]

    @property
    def name(self) -> str:
        """Name of the underlying source."""
        return self.source.name

    def keys(self) -> tuple[str, ...]:
        """Returns the tensor names; derived ones only if all their terms exist."""
        given = set(self.source.keys())
        used = {
            term.tensor for derived in self.derived.values() for term in derived.used
        }
        kept = [key for key in self.source.keys() if key not in used]
        return (*kept, *[k for k, d in self.derived.items() if _needs(d) <= given])

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        if key not in self.derived:
            return self.source.shape(key)
        return self.derived[key].terms[0].shape(self.source)

    def dtype(self, key: str) -> np.dtype:
        """Returns the dtype of a tensor."""
        if key not in self.derived:
            return self.source.dtype(key)
        return self.source.dtype(self.derived[key].terms[0].tensor)

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a tensor, or the region selected by `slices`."""
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
    """Replaces source tensors by the tensors derived from them.

    Args:
      source: Source of the original tensors.
      derived: Derived tensors that replace their terms.
      check_zeros: Whether to read and check the terms that must be zero; False where
        only shapes and dtypes are needed.

    Raises:
      ValueError: If the terms of a sum differ in shape or dtype, or a term that must
        be zero is not. All are listed.
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
    """Splits derived tensors into the source tensors: the inverse of `derive`.

    Args:
      tensors: Tensors by the names used in rules.
      derived: Derived tensors among them.

    Returns:
      Source tensors by name, those that are not derived first.
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
