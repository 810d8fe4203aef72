"""Rules completed by the leaves at hand: unrolled destinations, layouts left out."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from bridge.adapt import Adapter
from bridge.pytorch._covered import Rules
from bridge.rules._rules import Rule

Shapes = Mapping[str, tuple[int, ...]]


def complete(rules: Rules, leaves: Shapes) -> Rules:
    """Returns rules whose destinations hold no `{name}`, and that all have a layout.

    A `{name}` in a destination is each number that the tree has in its place, and the
    same in the sources: a rule for each layer of a model that is not stacked.

    Args:
      rules: Rules and adapters.
      leaves: Leaf shapes of the tree by path.
    """
    return [
        _with_layout(one, leaves) if isinstance(one, Rule) else one
        for rule in rules
        for one in _unrolled(rule, leaves)
    ]


def _unrolled(rule: Rule | Adapter, leaves: Shapes) -> Iterator[Rule | Adapter]:
    parts = rule.rules if isinstance(rule, Adapter) else (rule,)
    patterns = [path for part in parts for path in part.destinations]
    if not any("{" in pattern for pattern in patterns):
        yield rule
        return
    found = {where for pattern in patterns for where in _numbers(pattern, leaves)}
    for where in sorted(found):
        yield _filled(rule, {f"{{{name}}}": str(number) for name, number in where})
    if not found:  # `bind` says that the tree has none
        yield rule


def _numbers(pattern: str, leaves: Shapes) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yields the numbers of each leaf that a pattern matches, by name."""
    pieces = re.split(r"\{(\w+)\}", pattern)
    regex = re.compile(
        "".join(
            rf"(?P<{piece}>\d+)" if i % 2 else re.escape(piece)
            for i, piece in enumerate(pieces)
        )
    )
    for leaf in leaves:
        if (match := regex.fullmatch(leaf)) is not None:
            yield tuple((name, int(text)) for name, text in match.groupdict().items())


def _filled(value: Any, where: Mapping[str, str]) -> Any:
    """Returns a value with numbers for names, in all texts inside of it."""
    if isinstance(value, str):
        for name, number in where.items():
            value = value.replace(name, number)
        return value
    if isinstance(value, tuple):
        return tuple(_filled(item, where) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = {name: _filled(getattr(value, name), where) for name in names}
        return dataclasses.replace(value, **changed)
    return value


def _with_layout(rule: Rule, leaves: Shapes) -> Rule:
    if rule.layout is not None or (path := rule.destinations[0]) not in leaves:
        return rule if rule.layout is not None else rule.unchanged(0)
    stacked = len(re.findall(r"\{\w+\}", rule.sources[0]))
    return rule.unchanged(len(leaves[path]) - stacked)
