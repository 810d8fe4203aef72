"""Proposal of rules from the names and classes of two models.

Layers are paired by name, after the few systematic renames between flax and PyTorch
and without the prefixes of wrappers; their classes determine the adapter. Shapes never
suggest a pair; they can only contradict one. Doubtful rows are printed, as code, for
review by someone who knows the model.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bridge._report import fold_numbers
from bridge.adapt._derived import derive
from bridge.formats._source import Source
from bridge.pytorch._covered import (
    Rules,
    covered_by,
    derived_of,
    ignored_by,
    matching,
    spell_out,
    ties_of,
)
from bridge.pytorch._doubts import channels_of, contradicted, flattened
from bridge.pytorch._match import Match, canonical, matches
from bridge.pytorch._pair import Row, pair
from bridge.pytorch._target import read_target
from bridge.pytorch._torch_files import open_torch
from bridge.pytorch._torch_layers import torch_layers
from bridge.pytorch._tree_layers import tree_layers
from bridge.rules._rules import Rule

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Proposed table of rules, for review: `print` shows it as code.

    Args:
      subject: Name of the source, for messages.
      rows: Proposed rules and adapters, with doubts.
      tensors: Shapes, by name, of tensors that no row covers.
      leaves: Shapes, by path, of leaves that no row covers.
      ignored: Names of tensors that are deliberately ignored.
      tied: Names of tensors that are tied to another one, with that one's name.
    """

    subject: str
    rows: tuple[Row, ...]
    tensors: Shapes
    leaves: Shapes
    ignored: tuple[str, ...]
    tied: Mapping[str, str]

    @property
    def is_certain(self) -> bool:
        """Whether every tensor and leaf is covered, and no row is in doubt."""
        doubts = any(row.doubts for row in self.rows)
        return not (doubts or self.tensors or self.leaves)

    @property
    def rules(self) -> Rules:
        """Rules of all rows, including those in doubt."""
        return tuple(row.rule for row in self.rows)

    def certain_rules(self) -> Rules:
        """Returns the rules if the proposal is certain.

        Raises:
          ValueError: If it is not; the message contains the table.
        """
        if self.is_certain:
            return self.rules
        raise ValueError(
            f"The weights of {self.subject} cannot be matched with certainty, and "
            "none is guessed. Correct this table, and pass it as `rules`:\n\n"
            f"{self}"
        )

    def __str__(self) -> str:
        lines = ["rules = [", *[f"    {row}" for row in self.rows], "]"]
        lines += _listed("Tensors without a rule", self.tensors)
        lines += _listed("Leaves without a rule", self.leaves)
        lines += [f"# Ignored: {', '.join(self.ignored)}"] * bool(self.ignored)
        lines += [f"# Tied: {key} is {other}" for key, other in self.tied.items()]
        return "\n".join(lines)


def propose_rules(
    source: Any, like: Any, *, ignore: Sequence[str] = (), prefix: str = ""
) -> Proposal:
    """Proposes the rules for a call of `from_torch`; reads no weights.

    A row is in doubt if the classes or shapes of both sides do not match, if a matrix
    is square and no class determines the order of its dims, if two biases become one,
    or if a linear layer may follow a flattened feature map, whose order differs.

    Args:
      source: PyTorch model, as in `from_torch`. A module gives fewer doubts than its
        state dict, as its classes are known.
      like: JAX model, as in `from_torch`.
      ignore: Patterns of tensors to ignore; `{name}` matches a number, `**` matches
        anything.
      prefix: Prefix of the tensors to load, which is removed from their names.

    Returns:
      Proposed rules, with doubts and everything that no rule covers.
    """
    tensors, target = open_torch(source, prefix), read_target(like)
    shapes = {name: tuple(leaf.shape) for name, leaf in target.leaves.items()}
    found = matches(torch_layers(source, tensors), tree_layers(like, target))
    rows = _layers(found, tensors, shapes)
    rows += _single(found, rows, tensors, shapes)
    rows += _bare(rows, tensors, shapes)
    rules = [row.rule for row in rows]
    tied = ties_of(tensors, rules)
    ignored = ignored_by(rules, ignore, tensors.keys())
    taken = _destinations(rules)
    covered = {*covered_by(rules, tensors.keys()), *ignored, *tied}
    return Proposal(
        tensors.name,
        tuple(rows),
        {k: tensors.shape(k) for k in tensors.keys() if k not in covered},
        {k: shape for k, shape in shapes.items() if k not in taken},
        tuple(sorted(ignored)),
        tied,
    )


def _layers(found: Sequence[Match], tensors: Source, leaves: Shapes) -> list[Row]:
    """Proposes a row for each pair of layers, with all doubts."""
    channels = channels_of([(match.theirs, match.ours) for match in found])
    rows = [
        _doubted(flattened(row, match.theirs, channels, match.ours.by), match.doubts)
        for match in found
        if (row := pair(match.theirs, match.ours)) is not None
    ]
    derived = derived_of([row.rule for row in rows])
    adapted = derive(tensors, derived, check_zeros=False)
    given = {key: adapted.shape(key) for key in adapted.keys()}
    return [contradicted(row, given, leaves) for row in rows if _names_any(row, given)]


def _names_any(row: Row, tensors: Shapes) -> bool:
    return any(
        matching(name, tensors)
        for sized in spell_out([row.rule], {})
        for name in sized.rule.sources
    )


def _doubted(row: Row, doubts: tuple[str, ...]) -> Row:
    return dataclasses.replace(row, doubts=(*doubts, *row.doubts))


def _single(
    found: Sequence[Match], rows: Sequence[Row], tensors: Source, leaves: Shapes
) -> list[Row]:
    """Proposes a rule for pairs of unknown classes with one tensor and one leaf."""
    rules = [row.rule for row in rows]
    covered, taken = set(covered_by(rules, tensors.keys())), _destinations(rules)
    made = []
    for match in found:
        theirs, ours = match.theirs, match.ours
        keys = [_join(theirs.path, n) for n in theirs.shapes]
        paths = [_join(ours.path, n) for n in ours.shapes]
        if len(keys) != 1 or len(paths) != 1:
            continue
        if paths[0] not in taken and not covered.intersection(
            matching(keys[0], dict.fromkeys(tensors.keys()))
        ):
            (shape,), (wanted,) = theirs.shapes.values(), ours.shapes.values()
            row = _as_it_is(keys[0], paths[0], shape, wanted)
            made.append(_doubted(row, match.doubts))
    return made


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _bare(rows: Sequence[Row], tensors: Source, leaves: Shapes) -> list[Row]:
    """Proposes a rule for each uncovered tensor with the name of an uncovered leaf."""
    rules = [row.rule for row in rows]
    covered, taken = set(covered_by(rules, tensors.keys())), _destinations(rules)
    free = collections.defaultdict(list)
    for leaf in leaves:
        if leaf not in taken:
            free[canonical(leaf)].append(leaf)
    return [
        _as_it_is(key, free[name][0], tensors.shape(key), leaves[free[name][0]])
        for key in tensors.keys()
        if key not in covered and len(free[name := canonical(key)]) == 1
    ]


def _as_it_is(
    key: str, leaf: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> Row:
    layout, doubts = _layout(shape, wanted), []
    if shape != wanted:
        doubts.append(f"{shape} in PyTorch, {wanted} in the tree")
    elif len(set(shape)) < len(shape):
        doubts.append(f"{shape}, and no class says which dim is which")
    return Row(Rule, "bridge.Rule", (key, leaf, layout), {}, tuple(doubts))


def _layout(shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Returns a layout that shapes allow, to be reviewed where they are not equal."""
    if len(shape) == 2 and shape != wanted:
        rows, columns = shape
        if wanted == (columns, rows):
            return "d0 d1 -> d1 d0"
        if len(wanted) == 3 and wanted[0] == columns:
            return "(d1 d2) d0 -> d0 d1 d2"
        if len(wanted) == 3 and wanted[-1] == rows:
            return "d2 (d0 d1) -> d0 d1 d2"
    dims = " ".join(f"d{dim}" for dim in range(len(shape)))
    return f"{dims} -> {dims}"


def _destinations(rules: Rules) -> set[str]:
    return {path for sized in spell_out(rules, {}) for path in sized.rule.destinations}


def _listed(heading: str, shapes: Shapes) -> list[str]:
    lines = fold_numbers([f"{name} {shape}" for name, shape in shapes.items()])
    return [f"# {heading}:", *[f"#   {line}" for line in lines]] if lines else []
