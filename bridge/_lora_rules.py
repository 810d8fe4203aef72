"""The rules of a LoRA's factors, which follow from those of the weights they adapt.

`"(heads head_dim) embed -> embed heads head_dim"` says all there is to say: `A` is
`"rank embed -> embed rank"` and `B` `"(heads head_dim) rank -> rank heads head_dim"`,
so that `A` and `B`, contracted over the rank, are laid out like the leaf itself.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping

from bridge._layout import Layout, Side
from bridge._lora_source import A_SUFFIX, B_SUFFIX, PREFIX
from bridge._mapping import Mapping as WeightMapping
from bridge._rules import Rule

A_LEAF = "lora_a"
B_LEAF = "lora_b"


def stem_of(rule: Rule) -> str:
    """Returns the name of the module, or modules, whose weight a rule speaks of."""
    return rule.sources[0].removesuffix(".weight")


def expand(pattern: str, sizes: Mapping[str, int]) -> list[str]:
    """Returns a name for each combination of layers that a pattern stands for."""
    captures = re.findall(r"\{(\w+)\}", pattern)
    return [
        pattern.format(**dict(zip(captures, position, strict=True)))
        for position in itertools.product(*[range(sizes[name]) for name in captures])
    ]


def adapted_rules(base: WeightMapping, modules: Collection[str]) -> tuple[Rule, ...]:
    """Returns the rules of the weights that an adapter has factors for.

    Args:
      base: The mapping of the base model.
      modules: Names of the modules with factors.

    Raises:
      ValueError: If a module has no weight of its own in the tree, or is one of
        several layers that are stacked there and not all adapted.
    """
    spoken: dict[str, Rule] = {}
    for rule in base.rules:
        for name in rule.sources:
            stems = expand(name.removesuffix(".weight"), base.sizes)
            spoken |= {stem: rule for stem in stems if name.endswith(".weight")}
    found = {
        spoken[module].sources: spoken[module] for module in modules if module in spoken
    }
    wrong = [f"  {m}: no weight of the model" for m in modules if m not in spoken]
    for rule in found.values():
        wrong += _unfit(rule, base, modules)
    if wrong:
        raise ValueError(
            "The factors cannot be kept beside the weights (merging them may do):\n"
            + "\n".join(wrong)
        )
    return tuple(found.values())


def factor_rules(
    rules: Collection[Rule], rank_of: Callable[[Rule], int]
) -> tuple[tuple[Rule, ...], dict[str, int]]:
    """Returns the rules of the factors of some weights, and the sizes of their ranks.

    Args:
      rules: The rules of the weights, of one tensor and one leaf each.
      rank_of: Returns the rank of a weight's factors.
    """
    factors, ranks = [], {}
    for number, rule in enumerate(rules):
        rank = f"lora_rank{number}"
        ranks[rank] = rank_of(rule)
        stem, leaf = PREFIX + stem_of(rule), rule.destinations[0]
        a, b = _layouts(rule.layouts[0], rank)
        factors.append(Rule(stem + A_SUFFIX, f"{leaf}.{A_LEAF}", a))
        factors.append(Rule(stem + B_SUFFIX, f"{leaf}.{B_LEAF}", b))
    return tuple(factors), ranks


def _unfit(rule: Rule, base: WeightMapping, modules: Collection[str]) -> Iterator[str]:
    stem = stem_of(rule)
    if len(rule.sources) > 1 or len(rule.destinations) > 1:
        yield f"  {stem}: its weight is cut, or joined with others, in the tree"
    elif not _is_separable(rule.layouts[0]):
        yield f"  {stem}: its weight is no matrix whose two sides stay apart"
    elif left := [m for m in expand(stem, base.sizes) if m not in modules]:
        yield f"  {stem}: stacked in the tree, and {', '.join(left)} not adapted"


def _is_separable(layout: Layout) -> bool:
    sides = [set(dim) for dim in layout.source]
    return len(sides) == 2 and all(
        set(dim) <= side or not set(dim) & side
        for dim in layout.destination
        for side in sides
    )


def _layouts(layout: Layout, rank: str) -> tuple[str, str]:
    """Returns the patterns of `A`, `[rank, in]`, and of `B`, `[out, rank]`."""
    outer, inner = layout.source
    ins = [dim for dim in layout.destination if set(dim) <= set(inner)]
    outs = [dim for dim in layout.destination if set(dim) <= set(outer)]
    a = f"{rank} {_text((inner,))} -> {_text(ins)} {rank}"
    return a, f"{_text((outer,))} {rank} -> {rank} {_text(outs)}"


def _text(side: Side | list[tuple[str, ...]]) -> str:
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in side)
