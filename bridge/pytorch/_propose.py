"""Proposal of rules from the names and classes of two models.

Layers are paired by name, after the few systematic renames between flax and PyTorch
and without the prefixes of wrappers; their classes determine the adapter. Shapes never
suggest a pair; they can only contradict one. Doubtful rows are printed, as code, for
review by someone who knows the model.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
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
from bridge.pytorch._doubts import (
    contradicted,
    convolutions_behind,
    dims_confirmed,
    feature_maps,
    flattened,
    unflattened,
)
from bridge.pytorch._fused import fused_rows
from bridge.pytorch._match import Match, matches, matches_of_tensors
from bridge.pytorch._pair import Row, pair
from bridge.pytorch._target import read_target
from bridge.pytorch._torch_files import open_torch
from bridge.pytorch._torch_layers import TorchLayer, torch_layers
from bridge.pytorch._tree_layers import TreeLayer, projections, tree_layers
from bridge.pytorch._unclassed import as_it_is, linear_general

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

    Examples:
      >>> tree = {"scale": jax.ShapeDtypeStruct((3,), jnp.float32)}
      >>> proposal = bridge.propose_rules({"norm.weight": np.ones(4, np.float32)}, tree)
      >>> proposal.is_certain, proposal.tensors
      (False, {'norm.weight': (4,)})
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
            f"{self}{self._example()}"
        )

    def _example(self) -> str:
        """Says how to write the first rule that is missing."""
        if not self.leaves:
            return ""
        leaf, shape = next(iter(self.leaves.items()))
        dims = " ".join(f"d{dim}" for dim in range(len(shape)))
        return (
            "\n\nWrite a rule for each leaf without one, from the tensor that fills "
            f'it: bridge.Rule("NAME", "{leaf}", "{dims} -> {dims}"), with the '
            "tensor's dims in its order on the left. List tensors that no leaf takes "
            "in `ignore`."
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
    or if a linear or recurrent layer, a norm or a convolution of fewer dims may follow
    a flattened feature map, whose order differs, or the output of a linear layer may be
    put into one.

    Args:
      source: PyTorch model, as in `from_torch`. A module gives fewer doubts than its
        state dict, as its classes are known.
      like: JAX model, as in `from_torch`.
      ignore: Patterns of tensors to ignore; `{name}` matches a number, `**` matches
        anything.
      prefix: Prefix of the tensors to load, which is removed from their names.

    Returns:
      Proposed rules, with doubts and everything that no rule covers.

    Examples:
      >>> state = {"head.weight": np.ones((4, 3), np.float32)}
      >>> tree = {"head": {"kernel": jax.ShapeDtypeStruct((3, 4), jnp.float32)}}
      >>> print(bridge.propose_rules(state, tree))
      rules = [
          adapt.linear("head", "head", bias=False),
      ]
    """
    tensors, target = open_torch(source, prefix), read_target(like)
    shapes = {name: tuple(leaf.shape) for name, leaf in target.leaves.items()}
    theirs, ours = torch_layers(source, tensors), tree_layers(like, target)
    if not any(layer.kind == "MultiheadAttention" for layer in theirs):
        ours = projections(ours)
    found = matches(theirs, ours)
    rows = _layers(found, tensors, shapes)
    rows += _single(found, rows, tensors, shapes)
    rows += _bare(found, rows, tensors, shapes)
    rows += _fused(rows, tensors, shapes)
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
    layers = [(match.theirs, match.ours) for match in found]
    maps = feature_maps(layers)
    behind = dict(zip(map(id, found), convolutions_behind(layers), strict=True))
    pairs = [
        (match, row)
        for match in found
        if (row := pair(match.theirs, match.ours)) is not None
    ]
    derived = derived_of([row.rule for _, row in pairs])
    adapted = derive(tensors, derived, check_zeros=False)
    given = {key: adapted.shape(key) for key in adapted.keys()}
    pairs = [
        (match, contradicted(row, given, leaves))
        for match, row in pairs
        if _names_any(row, given)
    ]
    in_order = dims_confirmed([(m.theirs, m.ours, row) for m, row in pairs])
    rows = []
    for (match, _), row in zip(pairs, in_order, strict=True):
        row = flattened(row, match.theirs, maps, match.ours.by)
        row = unflattened(row, match.theirs, behind[id(match)])
        rows.append(_doubted(row, match.doubts))
    return rows


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
    """Proposes rules for pairs of layers that no adapter covers.

    Linear layers of several dims, and layers of one tensor and one leaf.
    """
    rules = [row.rule for row in rows]
    covered, taken = set(covered_by(rules, tensors.keys())), _destinations(rules)
    names = dict.fromkeys(tensors.keys())
    made = []
    for match in found:
        theirs, ours = match.theirs, match.ours
        keys = [_join(theirs.path, n) for n in theirs.shapes]
        paths = [_join(ours.path, n) for n in ours.shapes]
        used = covered.intersection(k for key in keys for k in matching(key, names))
        if used or taken.intersection(paths):
            continue
        of_layer = linear_general(theirs, ours)
        if not of_layer and len(keys) == 1 == len(paths):
            (shape,), (wanted,) = theirs.shapes.values(), ours.shapes.values()
            of_layer = [as_it_is(keys[0], paths[0], shape, wanted)]
        made += [_doubted(row, match.doubts) for row in of_layer]
    return made


def _join(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))


def _bare(
    found: Sequence[Match], rows: Sequence[Row], tensors: Source, leaves: Shapes
) -> list[Row]:
    """Proposes a rule for each uncovered tensor with the name of an uncovered leaf.

    A table that is a module in one model, with a `weight` or an `embedding`, may be a
    parameter in the other.
    """
    rules = [row.rule for row in rows]
    covered, taken = set(covered_by(rules, tensors.keys())), _destinations(rules)
    theirs = [
        TorchLayer(*_table(key, {"weight"}, tensors.shape(key)))
        for key in tensors.keys()
        if key not in covered
    ]
    ours = [
        TreeLayer(*_table(leaf, {"weight", "embedding"}, shape), by="names")
        for leaf, shape in leaves.items()
        if leaf not in taken
    ]
    made = []
    for match in matches_of_tensors(theirs, ours, found):
        ((key, shape),) = match.theirs.shapes.items()
        ((leaf, wanted),) = match.ours.shapes.items()
        names = _join(match.theirs.path, key), _join(match.ours.path, leaf)
        made.append(_doubted(as_it_is(*names, shape, wanted), match.doubts))
    return made


def _fused(rows: Sequence[Row], tensors: Source, leaves: Shapes) -> list[Row]:
    """Proposes, in doubt, one tensor of query, key and value for three leaves."""
    rules = [row.rule for row in rows]
    covered, taken = set(covered_by(rules, tensors.keys())), _destinations(rules)
    return fused_rows(
        {key: tensors.shape(key) for key in tensors.keys() if key not in covered},
        {leaf: shape for leaf, shape in leaves.items() if leaf not in taken},
    )


def _table(
    name: str, ends: Collection[str], shape: tuple[int, ...]
) -> tuple[str, None, dict[str, tuple[int, ...]]]:
    """Returns the path, kind and shapes of a tensor as a layer of its own."""
    path, _, end = name.rpartition(".")
    return (path, None, {end: shape}) if end in ends else (name, None, {"": shape})


def _destinations(rules: Rules) -> set[str]:
    return {path for sized in spell_out(rules, {}) for path in sized.rule.destinations}


def _listed(heading: str, shapes: Shapes) -> list[str]:
    lines = fold_numbers([f"{name} {shape}" for name, shape in shapes.items()])
    return [f"# {heading}:", *[f"#   {line}" for line in lines]] if lines else []
