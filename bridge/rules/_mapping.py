"""Mapping: all rules of one model, and the check that they cover every tensor."""

import collections
import dataclasses
import functools
import re
from collections import abc
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from bridge._report import format_report
from bridge.formats._source import Source
from bridge.rules._piece import Piece
from bridge.rules._rules import Rule, RuleSizes

Abstract = abc.Mapping[str, Any]
"""Objects with a shape and a dtype, by name."""


@dataclasses.dataclass(frozen=True)
class Mapping:
    """One-to-one correspondence of a checkpoint's tensors and a tree's leaves.

    Args:
      rules: Rules of the model; exactly one covers each tensor and each leaf.
      sizes: Size of each dim that the rules name; size or range of each `{name}`.
      ignore: Patterns of tensors that may be in a checkpoint and are not used;
        `{name}` matches a number, `**` matches anything.

    Raises:
      ValueError: If a rule names a dim without a size.

    Examples:
      >>> rule = bridge.Rule("head.weight", "head.kernel", "out in -> in out")
      >>> mapping = bridge.Mapping((rule,), sizes={"out": 4, "in": 3})
      >>> [piece.destination_shape for piece in mapping.by_source()["head.weight"]]
      [(3, 4)]
    """

    rules: tuple[Rule, ...]
    sizes: RuleSizes
    ignore: tuple[str, ...] = ()

    def __post_init__(self):
        """Checks that every named dim has a size."""
        named = {name for rule in self.rules for name in rule.dims}
        if unknown := sorted(named - set(self.sizes)):
            raise ValueError(
                f"The rules name the dims {unknown}, but sizes are given for "
                f"{sorted(self.sizes)} alone. Add them to `sizes`."
            )

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces of all rules: one per tensor section, layers innermost."""
        return tuple(piece for rule in self.rules for piece in rule.pieces(self.sizes))

    def by_source(self) -> dict[str, list[Piece]]:
        """Returns the pieces of each tensor of the checkpoint."""
        return _group(self.pieces, "source")

    def by_destination(self) -> dict[str, list[Piece]]:
        """Returns the pieces of each leaf of the tree."""
        return _group(self.pieces, "destination")

    def check(
        self,
        leaves: Abstract,
        source: Source | None = None,
    ) -> None:
        """Checks tree and checkpoint against the rules; reads only tensor headers.

        Args:
          leaves: Leaves of the tree by path: abstract or concrete arrays.
          source: Checkpoint to read, or None if it is yet to be written.

        Raises:
          ValueError: If a tensor or leaf is missing, unexpected, of another shape, of
            a dtype that cannot be cast, or covered by two rules. All are listed.
        """
        report = {
            "covered by more than one rule": self._ambiguous(),
            **_differences("the tree", self.by_destination(), leaves, "destination"),
        }
        if source is not None:
            tensors = _headers(source, self.ignore)
            report |= _differences(
                "the checkpoint", self.by_source(), tensors, "source"
            )
            report["of a dtype that is not cast to the tree's"] = _uncastable(
                self.pieces, tensors, leaves
            )
        if any(report.values()):
            subject = "The tree" if source is None else f"'{source.name}' and the tree"
            raise ValueError(
                f"{subject} do not fit the config:\n{format_report(report)}"
            )

    def _ambiguous(self) -> list[str]:
        users = collections.defaultdict(set)
        for number, rule in enumerate(self.rules):
            for piece in rule.pieces(self.sizes):
                users["tensor " + piece.source].add(number)
                users["leaf " + piece.destination].add(number)
        return [name for name, numbers in users.items() if len(numbers) > 1]


def castable(stored: DTypeLike, wanted: DTypeLike, *, is_table: bool = False) -> bool:
    """Returns whether values may be cast: equal dtypes, or both floating point.

    An abstract tree of another float dtype requests the cast: float32 weights are
    rounded to bfloat16, or bfloat16 weights widened to float32 main weights. Integers
    are tables or packed values, so a cast to or from them would be a mistake, but for
    tables that a rule names.

    Args:
      stored: Dtype of the values.
      wanted: Dtype to cast them to.
      is_table: Whether a rule says that they are integers on one side.
    """
    kind = jnp.number if is_table else jnp.floating
    allowed = [jnp.issubdtype(dtype, kind) for dtype in (stored, wanted)]
    return jnp.dtype(stored) == jnp.dtype(wanted) or all(allowed)


def _group(pieces: Iterable[Piece], side: str) -> dict[str, list[Piece]]:
    groups = collections.defaultdict(list)
    for piece in pieces:
        groups[getattr(piece, side)].append(piece)
    return dict(groups)


def _headers(
    source: Source, ignore: tuple[str, ...]
) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        key: jax.ShapeDtypeStruct(source.shape(key), source.dtype(key))
        for key in source.keys()
        if not is_ignored(key, ignore)
    }


def is_ignored(key: str, patterns: tuple[str, ...]) -> bool:
    """Returns whether a tensor matches one of the `ignore` patterns of a `Mapping`."""
    return any(_ignored(pattern).fullmatch(key) for pattern in patterns)


@functools.cache
def _ignored(pattern: str) -> re.Pattern[str]:
    meanings = {"**": ".*"}  # any other placeholder is a number
    parts = re.split(r"(\{\w+\}|\*\*)", pattern)
    return re.compile(
        "".join(
            re.escape(part) if i % 2 == 0 else meanings.get(part, r"\d+")
            for i, part in enumerate(parts)
        )
    )


def _differences(
    subject: str,
    expected: dict[str, list[Piece]],
    given: Abstract,
    side: str,
) -> dict[str, list[str]]:
    shapes = {key: getattr(p[0], f"{side}_shape") for key, p in expected.items()}
    return {
        f"missing in {subject}": [key for key in shapes if key not in given],
        f"unexpected in {subject}": [key for key in given if key not in shapes],
        f"of another shape in {subject}": [
            f"{key}: {tuple(given[key].shape)}, the config says {shape}"
            for key, shape in shapes.items()
            if key in given and tuple(given[key].shape) != shape
        ],
    }


def _uncastable(
    pieces: Iterable[Piece],
    tensors: Abstract,
    leaves: Abstract,
) -> list[str]:
    return [
        f"{p.source}: {tensors[p.source].dtype}, the tree wants "
        f"{leaves[p.destination].dtype}"
        for p in pieces
        if p.source in tensors and p.destination in leaves
        if not castable(
            tensors[p.source].dtype,
            leaves[p.destination].dtype,
            is_table=p.integers is not None,
        )
    ]
