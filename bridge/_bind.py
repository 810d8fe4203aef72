"""Binding: rules that name any model's tensors become the mapping of this one.

Two linears of a model both say `"out in -> in out"` and mean other sizes, so that the
dims of each rule get names of its own.
"""

import collections
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bridge._derived import Derived
from bridge._mapping import Mapping as WeightMapping
from bridge._mapping import castable
from bridge._report import format_report
from bridge._rules import Rule
from bridge._sizes import settle
from bridge._source import Source
from bridge._torch_source import tied_in
from bridge.adapt import Adapter

Rules = Sequence[Rule | Adapter]
Report = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A rule, and the sizes that its own adapter gives."""

    rule: Rule
    sizes: Mapping[str, int]


def entries_of(rules: Rules, sizes: Mapping[str, int]) -> list[Entry]:
    """Spells adapters out; the caller's sizes hold for every rule."""
    entries = []
    for rule in rules:
        adapter = rule if isinstance(rule, Adapter) else Adapter((rule,))
        entries += [Entry(r, {**sizes, **adapter.sizes}) for r in adapter.rules]
    return entries


def derived_of(rules: Rules) -> list[Derived]:
    """Returns the tensors that adapters derive."""
    return [d for rule in rules if isinstance(rule, Adapter) for d in rule.derived]


def ignored_by(rules: Rules, ignore: Sequence[str], keys: Collection[str]) -> list[str]:
    """Returns the tensors that adapters, or the caller, leave aside by name."""
    patterns = [*ignore] + [
        name for rule in rules if isinstance(rule, Adapter) for name in rule.ignore
    ]
    return [key for key in keys if any(_is(key, pattern) for pattern in patterns)]


def spoken_of(rules: Rules, keys: Collection[str]) -> list[str]:
    """Returns the tensors that some rule, or what a rule derives from, names."""
    patterns = [name for entry in entries_of(rules, {}) for name in entry.rule.sources]
    patterns += [term.tensor for d in derived_of(rules) for term in d.used]
    return [key for key in keys if any(_is(key, pattern) for pattern in patterns)]


def ties_of(source: Source, rules: Rules) -> dict[str, str]:
    """Returns the tensors that need no rule, as they are another one that has one.

    Only what shares memory, or storage in a file, is tied: equal values are not.

    Returns:
      For each of them, the name of the one that a rule speaks of.
    """
    tied = tied_in(source)
    spoken = set(spoken_of(rules, source.keys()))
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for key in source.keys():
        groups[tied.get(key, key)].append(key)
    return {
        key: known[0]
        for group in groups.values()
        if (known := [key for key in group if key in spoken])
        for key in group
        if key not in spoken
    }


def bind(
    entries: Sequence[Entry],
    leaves: Mapping[str, Any],
    source: Source | None,
    spare: Collection[str] = (),
) -> WeightMapping:
    """Makes the mapping of one source and one tree, and checks it all; reads no data.

    Args:
      entries: The rules.
      leaves: The tree's leaves by path.
      source: The tensors; None if they are yet to be made.
      spare: Tensors of the source that need no rule.

    Raises:
      ValueError: If a tensor or leaf is missing, unexpected, of another shape, of a
        dtype that is not cast, or spoken of by two rules, or if a size follows from
        no shape. All are listed.
    """
    tensors = {} if source is None else {k: source.shape(k) for k in source.keys()}
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    report: Report = collections.defaultdict(list)
    bound = []
    for number, entry in enumerate(entries):
        sizes, wrong = settle(entry.rule, tensors, shapes, entry.sizes)
        missing = _missing(entry.rule, sizes, source, tensors, shapes)
        unsettled = sorted(entry.rule.dims - set(sizes))
        for heading, names in missing.items():
            report[heading] += names
        report["of another shape"] += wrong
        if unsettled and not wrong and not any(missing.values()):
            report["of a size that follows from no shape, give `sizes`"].append(
                f"{', '.join(unsettled)} of {' and '.join(entry.rule.destinations)}"
            )
        bound.append(_rename(entry.rule, sizes, f"_{number}"))
    rules = [entry.rule for entry in entries]
    report |= _unspoken(rules, tensors, shapes, spare)
    if source is not None:
        report["of a dtype that is not cast"] = _uncastable(rules, source, leaves)
    if any(report.values()):
        subject = "The tree" if source is None else f"'{source.name}' and the tree"
        raise ValueError(f"{subject} do not fit the rules:\n{format_report(report)}")
    sizes = {name: size for _, named in bound for name, size in named.items()}
    return WeightMapping(tuple(rule for rule, _ in bound), sizes, tuple(spare))


def _missing(
    rule: Rule,
    sizes: Mapping[str, int],
    source: Source | None,
    tensors: Mapping[str, Any],
    leaves: Mapping[str, Any],
) -> Report:
    captures = re.findall(r"\{(\w+)\}", rule.sources[0])
    names: list[str] = []
    if source is not None and all(name in sizes for name in captures):
        grid = np.ndindex(*[sizes[name] for name in captures])
        names = [
            pattern.format(**dict(zip(captures, where, strict=True)))
            for where in grid
            for pattern in rule.sources
        ]
    return {
        "missing in the source": [name for name in names if name not in tensors],
        "missing in the tree": [n for n in rule.destinations if n not in leaves],
    }


def _unspoken(
    rules: Sequence[Rule],
    tensors: Collection[str],
    leaves: Collection[str],
    spare: Collection[str],
) -> Report:
    patterns = [name for rule in rules for name in rule.sources]
    paths = [name for rule in rules for name in rule.destinations]
    users = {key: sum(_is(key, p) for p in patterns) for key in tensors}
    twice = [f"tensor {key}" for key, count in users.items() if count > 1]
    counts = collections.Counter(paths)
    return {
        "unexpected in the source": [
            key for key, count in users.items() if not count and key not in spare
        ],
        "unexpected in the tree": [name for name in leaves if not counts[name]],
        "spoken of by more than one rule": twice
        + [f"leaf {name}" for name, count in counts.items() if count > 1],
    }


def _uncastable(
    rules: Sequence[Rule], source: Source, leaves: Mapping[str, Any]
) -> list[str]:
    tensors = [key for key in source.keys()]
    return [
        f"{key}: {source.dtype(key)}, the tree wants {leaves[path].dtype}"
        for rule in rules
        for pattern in rule.sources
        for key in tensors
        if _is(key, pattern)
        for path in rule.destinations
        if path in leaves and not castable(source.dtype(key), leaves[path].dtype)
    ]


def _rename(
    rule: Rule, sizes: Mapping[str, int], suffix: str
) -> tuple[Rule, dict[str, int]]:
    """Gives the dims of a rule names that no other rule has."""
    source = tuple(re.sub(r"\{(\w+)\}", rf"{{\1{suffix}}}", s) for s in rule.sources)
    patterns = (rule.layout,) if isinstance(rule.layout, str) else rule.layout
    layout = tuple(re.sub(r"\b([a-z]\w*)", rf"\1{suffix}", text) for text in patterns)
    renamed = dataclasses.replace(rule, source=source, layout=layout)
    return renamed, {name + suffix: size for name, size in sizes.items()}


def _is(key: str, pattern: str) -> bool:
    """Says whether a name is a pattern with numbers for its `{names}`."""
    if "{" not in pattern:
        return key == pattern
    parts = map(re.escape, re.split(r"\{\w+\}", pattern))
    return re.fullmatch(r"\d+".join(parts), key) is not None


def structs_of(leaves: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape, dtype and sharding of leaves, arrays or not."""
    return {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)
        )
        for name, leaf in leaves.items()
    }
