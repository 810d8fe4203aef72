"""Binding of rules to the shapes of one model, which gives its mapping.

Two linear layers both have the layout `"out in -> in out"` with different sizes, so
the dims are renamed to be unique to each rule.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bridge._report import format_report
from bridge.formats._source import Source
from bridge.pytorch._covered import SizedRule, matching
from bridge.pytorch._sizes import Sizes, settle
from bridge.rules._mapping import Mapping as WeightMapping
from bridge.rules._mapping import castable
from bridge.rules._rules import Rule

Report = Mapping[str, list[str]]


def bind(
    rules: Sequence[SizedRule],
    leaves: Mapping[str, Any],
    source: Source | None,
    spare: Collection[str] = (),
) -> WeightMapping:
    """Returns the validated mapping of one source and one tree; reads no data.

    Args:
      rules: Rules with their known sizes.
      leaves: Leaves of the tree by path.
      source: Source of the tensors; None if they are yet to be created.
      spare: Names of tensors in the source that need no rule.

    Raises:
      ValueError: If a tensor or leaf is missing, unexpected, of another shape, of a
        dtype that cannot be cast, or covered by two rules, or if a size cannot be
        inferred from the shapes. All are listed.
    """
    tensors = {} if source is None else {k: source.shape(k) for k in source.keys()}
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    settled = [settle(r.rule, tensors, shapes, r.sizes) for r in rules]
    plain = [sized.rule for sized in rules]
    sizes = [found for found, _ in settled]
    missing = _missing(plain, sizes, None if source is None else tensors, shapes)
    report = {
        **missing,
        **_unexpected(plain, sizes, tensors, shapes, spare),
        "of another shape": [line for _, wrong in settled for line in wrong],
    }
    if source is not None:
        report["of a dtype that is not cast"] = _uncastable(plain, source, leaves)
    # Missing tensors and wrong shapes also leave sizes unknown: report them only once.
    if not any(missing.values()) and not report["of another shape"]:
        report["of a size that follows from no shape: give `sizes`"] = [
            f"{', '.join(unknown)} of {' and '.join(rule.destinations)}"
            for rule, found in zip(plain, sizes, strict=True)
            if (unknown := sorted(rule.dims - set(found)))
        ]
    if any(report.values()):
        subject = "The tree" if source is None else f"'{source.name}' and the tree"
        raise ValueError(f"{subject} do not fit the rules:\n{format_report(report)}")
    return _mapping(plain, sizes, spare)


def _missing(
    rules: Sequence[Rule],
    sizes: Sequence[Sizes],
    tensors: Collection[str] | None,
    leaves: Collection[str],
) -> Report:
    names = [
        name
        for rule, found in zip(rules, sizes, strict=True)
        for name in _names(rule, found)
    ]
    paths = [path for rule in rules for path in rule.destinations]
    return {
        "missing in the source": [
            name for name in names if tensors is not None and name not in tensors
        ],
        "missing in the tree": [path for path in paths if path not in leaves],
    }


def _names(rule: Rule, sizes: Sizes) -> list[str]:
    """Returns all tensor names of a rule; none if the number of layers is unknown."""
    captures = re.findall(r"\{(\w+)\}", rule.sources[0])
    counts = [range(sizes.get(name, 0)) for name in captures]
    return [
        pattern.format(**dict(zip(captures, position, strict=True)))
        for position in itertools.product(*counts)
        for pattern in rule.sources
    ]


def _all_layers(rule: Rule, tensors: Collection[str]) -> list[str]:
    return [key for pattern in rule.sources for key in matching(pattern, tensors)]


def _unexpected(
    rules: Sequence[Rule],
    sizes: Sequence[Sizes],
    tensors: Collection[str],
    leaves: Collection[str],
    spare: Collection[str],
) -> Report:
    users = collections.Counter(
        key
        for rule, found in zip(rules, sizes, strict=True)
        for key in _names(rule, found) or _all_layers(rule, tensors)
        if key in tensors
    )
    takers = collections.Counter(path for rule in rules for path in rule.destinations)
    return {
        "unexpected in the source": [
            key for key in tensors if not users[key] and key not in spare
        ],
        "unexpected in the tree": [path for path in leaves if not takers[path]],
        "covered by more than one rule": [
            *[f"tensor {key}" for key, count in users.items() if count > 1],
            *[f"leaf {path}" for path, count in takers.items() if count > 1],
        ],
    }


def _uncastable(
    rules: Sequence[Rule], source: Source, leaves: Mapping[str, Any]
) -> list[str]:
    names = dict.fromkeys(source.keys())
    return [
        f"{key}: {source.dtype(key)}, the tree wants {leaves[path].dtype}"
        for rule in rules
        for pattern in rule.sources
        for key in matching(pattern, names)
        for path in rule.destinations
        if path in leaves
        and not castable(
            *(source.dtype(key), leaves[path].dtype),
            is_table=rule.integers is not None,
        )
    ]


def _mapping(
    rules: Sequence[Rule], sizes: Sequence[Sizes], spare: Collection[str]
) -> WeightMapping:
    """Returns a mapping of the rules, with dims renamed to be unique to each rule."""
    renamed, all_sizes = [], {}
    for number, (rule, found) in enumerate(zip(rules, sizes, strict=True)):
        assert rule.layout is not None
        end = f"_{number}"
        source = tuple(re.sub(r"\{(\w+)\}", rf"{{\1{end}}}", s) for s in rule.sources)
        texts = (rule.layout,) if isinstance(rule.layout, str) else rule.layout
        layout = tuple(re.sub(r"\b([a-z]\w*)", rf"\1{end}", text) for text in texts)
        repeat = rule.repeat and f"{rule.repeat}{end}"
        renamed.append(
            dataclasses.replace(rule, source=source, layout=layout, repeat=repeat)
        )
        all_sizes |= {name + end: size for name, size in found.items()}
    return WeightMapping(tuple(renamed), all_sizes, tuple(spare))
