"""Proposal of rules from the names and classes of two models.

Layers are paired by name, after the few systematic renames between flax and PyTorch;
their classes determine the adapter. Shapes never suggest a pair; they can only
contradict one. Doubtful rows are printed, as code, for review by someone who knows
the model.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bridge._report import fold_numbers
from bridge.adapt._derived import derive
from bridge.formats._source import Source
from bridge.pytorch._doubts import channels_of, contradicted, flattened
from bridge.pytorch._pair import Row, pair
from bridge.pytorch._spoken import (
    Rules,
    derived_of,
    ignored_by,
    spell_out,
    spoken_of,
    ties_of,
)
from bridge.pytorch._target import read_target
from bridge.pytorch._torch_files import open_torch
from bridge.pytorch._torch_layers import TorchLayer, torch_layers
from bridge.pytorch._tree_layers import TreeLayer, tree_layers
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
        lines += [f"# Left aside: {', '.join(self.ignored)}"] * bool(self.ignored)
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
    pairs = _pairs(torch_layers(source, tensors), tree_layers(like, target))
    rows = _layers(pairs, tensors, shapes)
    rows += _bare(rows, tensors, shapes)
    rules = [row.rule for row in rows]
    tied = ties_of(tensors, rules)
    ignored = ignored_by(rules, ignore, tensors.keys())
    taken = _destinations(rules)
    spoken = {*spoken_of(rules, tensors.keys()), *ignored, *tied}
    return Proposal(
        tensors.name,
        tuple(rows),
        {k: tensors.shape(k) for k in tensors.keys() if k not in spoken},
        {k: shape for k, shape in shapes.items() if k not in taken},
        tuple(sorted(ignored)),
        tied,
    )


def canonical(path: str) -> str:
    """Returns the canonical form of a path, without naming conventions of frameworks.

    linen's `layers_0` becomes `layers.0`; the `layers` of flax's `Sequential`, the
    `cell` of its `RNN`, and prefixes of collections and wrappers are removed.
    """
    path = re.sub(r"_(\d+)(?=\.|$)", r".\1", path)
    path = re.sub(r"^((params|batch_stats|module|_orig_mod)(\.|$))+", "", path)
    path = re.sub(r"(^|\.)layers\.(?=\d)", r"\1", path)
    return re.sub(r"\.cell$", "", path)


def _layers(
    pairs: Sequence[tuple[TorchLayer, TreeLayer]], tensors: Source, leaves: Shapes
) -> list[Row]:
    """Proposes a row for each pair of layers, with all doubts."""
    channels = channels_of(pairs)
    rows = [
        flattened(row, theirs, channels, ours.by)
        for theirs, ours in pairs
        if (row := pair(theirs, ours)) is not None
    ]
    derived = derived_of([row.rule for row in rows])
    adapted = derive(tensors, derived, check_zeros=False)
    given = {key: adapted.shape(key) for key in adapted.keys()}
    return [contradicted(row, given, leaves) for row in rows if _names_any(row, given)]


def _names_any(row: Row, tensors: Shapes) -> bool:
    return any(
        name in tensors
        for sized in spell_out([row.rule], {})
        for name in sized.rule.sources
    )


def _pairs(
    theirs: Sequence[TorchLayer], ours: Sequence[TreeLayer]
) -> list[tuple[TorchLayer, TreeLayer]]:
    """Returns the pairs of layers whose canonical name is unique on each side."""
    left, right = collections.defaultdict(list), collections.defaultdict(list)
    for layer in theirs:
        left[canonical(layer.path)].append(layer)
    for layer in ours:
        right[canonical(layer.path)].append(layer)
    return [
        (layers[0], right[name][0])
        for name, layers in left.items()
        if len(layers) == 1 == len(right[name])
    ]


def _bare(rows: Sequence[Row], tensors: Source, leaves: Shapes) -> list[Row]:
    """Proposes a rule for each uncovered tensor with the name of an uncovered leaf."""
    rules = [row.rule for row in rows]
    spoken, taken = set(spoken_of(rules, tensors.keys())), _destinations(rules)
    free = collections.defaultdict(list)
    for leaf in leaves:
        if leaf not in taken:
            free[canonical(leaf)].append(leaf)
    return [
        _as_it_is(key, free[name][0], tensors.shape(key), leaves[free[name][0]])
        for key in tensors.keys()
        if key not in spoken and len(free[name := canonical(key)]) == 1
    ]


def _as_it_is(
    key: str, leaf: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> Row:
    dims = " ".join(f"d{dim}" for dim in range(len(shape)))
    doubts = []
    if shape != wanted:
        doubts.append(f"{shape} in PyTorch, {wanted} in the tree")
    elif len(set(shape)) < len(shape):
        doubts.append(f"{shape}, and no class says which dim is which")
    return Row(Rule, "bridge.Rule", (key, leaf, f"{dims} -> {dims}"), {}, tuple(doubts))


def _destinations(rules: Rules) -> set[str]:
    return {path for sized in spell_out(rules, {}) for path in sized.rule.destinations}


def _listed(heading: str, shapes: Shapes) -> list[str]:
    lines = fold_numbers([f"{name} {shape}" for name, shape in shapes.items()])
    return [f"# {heading}:", *[f"#   {line}" for line in lines]] if lines else []
