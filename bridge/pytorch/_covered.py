"""Tensors that are covered by rules and adapters, and tensors that need no rule."""

import collections
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

from bridge.adapt import Adapter
from bridge.adapt._derived import Derived
from bridge.formats._source import Source
from bridge.pytorch._torch_source import tied_in
from bridge.rules._mapping import is_ignored
from bridge.rules._rules import Rule

Rules = Sequence[Rule | Adapter]
"""Rules and adapters, as accepted by `from_torch`."""


@dataclasses.dataclass(frozen=True)
class SizedRule:
    """Rule with the sizes that are known without shapes.

    Args:
      rule: Rule of an adapter or of the caller.
      sizes: Known sizes by dim name.
    """

    rule: Rule
    sizes: Mapping[str, int]


def spell_out(rules: Rules, sizes: Mapping[str, int]) -> list[SizedRule]:
    """Expands adapters to their rules.

    Args:
      rules: Rules and adapters.
      sizes: Sizes for every rule; those of an adapter take precedence.
    """
    spelled = []
    for rule in rules:
        adapter = rule if isinstance(rule, Adapter) else Adapter((rule,))
        spelled += [SizedRule(r, {**sizes, **adapter.sizes}) for r in adapter.rules]
    return spelled


def derived_of(rules: Rules) -> list[Derived]:
    """Returns the derived tensors of all adapters."""
    return [d for rule in rules if isinstance(rule, Adapter) for d in rule.derived]


def matching(pattern: str, names: Collection[str]) -> list[str]:
    """Returns the names that match a pattern in which `{name}` is a number."""
    if "{" not in pattern:
        return [pattern] if pattern in names else []
    parts = map(re.escape, re.split(r"\{\w+\}", pattern))
    regex = re.compile(r"\d+".join(parts))
    return [name for name in names if regex.fullmatch(name)]


def ignored_by(rules: Rules, ignore: Sequence[str], names: Collection[str]) -> set[str]:
    """Returns the names of tensors that adapters or the caller ignore."""
    adapters = [rule for rule in rules if isinstance(rule, Adapter)]
    patterns = (*ignore, *[name for adapter in adapters for name in adapter.ignore])
    return {name for name in names if is_ignored(name, patterns)}


def covered_by(rules: Rules, names: Collection[str]) -> set[str]:
    """Returns the names of tensors that a rule covers, directly or as a derived one."""
    patterns = [name for sized in spell_out(rules, {}) for name in sized.rule.sources]
    patterns += [term.tensor for derived in derived_of(rules) for term in derived.used]
    held = dict.fromkeys(names)  # constant-time lookup that keeps the order
    return {name for pattern in patterns for name in matching(pattern, held)}


def ties_of(source: Source, rules: Rules) -> dict[str, str]:
    """Returns the tensors that need no rule because they are tied to one that has one.

    Returns:
      Name of the tied tensor that a rule covers, for each tensor without a rule.
    """
    tied, covered = tied_in(source), covered_by(rules, source.keys())
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for key in source.keys():
        groups[tied.get(key, key)].append(key)
    return {
        key: known[0]
        for group in groups.values()
        if (known := [key for key in group if key in covered])
        for key in group
        if key not in covered
    }
