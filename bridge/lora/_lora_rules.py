"""Rules of LoRA factors, derived from the rules of the weights they adapt.

`"(heads head_dim) embed -> embed heads head_dim"` determines both factors: `A` is
`"rank embed -> embed rank"` and `B` `"(heads head_dim) rank -> rank heads head_dim"`,
so that `A` and `B`, contracted over the rank, have the layout of the leaf.
"""

import dataclasses
from collections.abc import Collection, Iterator

from bridge.lora._lora_source import A_SUFFIX, B_SUFFIX, PREFIX
from bridge.rules._layout import Layout, Side
from bridge.rules._mapping import Mapping as WeightMapping
from bridge.rules._rules import Rule

A_LEAF = "lora_a"
B_LEAF = "lora_b"


@dataclasses.dataclass(frozen=True)
class Adapted:
    """Weight of the tree that has factors.

    Args:
      rule: Rule of the weight, with one source and one destination.
      modules: Names of the modules, one per stacked layer.
      stacked: Sizes of the stacked dims; empty without stacking.
      transposed: Whether the tensors are stored as `[in, out]`.
    """

    rule: Rule
    modules: tuple[str, ...]
    stacked: tuple[int, ...]
    transposed: bool

    @property
    def leaf(self) -> str:
        """Path of the weight."""
        return self.rule.destinations[0]

    @property
    def num_in(self) -> int:
        """Number of input dims of the leaf, which follow its stacked dims."""
        layout = self.rule.layouts[0]
        _, inner = layout.source[:: -1 if self.transposed else 1]
        return len(_within(layout, inner))

    def factor_rules(self, rank: str) -> tuple[Rule, Rule]:
        """Returns the rules of `A`, `[rank, in]`, and `B`, `[out, rank]`.

        Args:
          rank: Name of the rank dim in the layouts.
        """
        layout = self.rule.layouts[0]
        outer, inner = layout.source[:: -1 if self.transposed else 1]
        stem = PREFIX + _stem(self.rule)
        ins, outs = (_text(_within(layout, side)) for side in (inner, outer))
        a = f"{rank} {_text([inner])} -> {ins} {rank}"
        b = f"{_text([outer])} {rank} -> {rank} {outs}"
        return (
            Rule(stem + A_SUFFIX, f"{self.leaf}.{A_LEAF}", a),
            Rule(stem + B_SUFFIX, f"{self.leaf}.{B_LEAF}", b),
        )


def adapted_weights(
    base: WeightMapping, modules: Collection[str], *, transposed: bool
) -> tuple[Adapted, ...]:
    """Returns the weights of the tree that belong to adapted modules.

    Args:
      base: Mapping of the base model.
      modules: Names of the adapted modules.
      transposed: Whether the base model stores weights as `[in, out]`.

    Raises:
      ValueError: If a module has no separate weight in the tree, or only some of the
        layers stacked with it are adapted.
    """
    found = [w for r in base.rules if (w := _weight(r, base, transposed)) is not None]
    found = [w for w in found if set(w.modules) & set(modules)]
    known = {module for weight in found for module in weight.modules}
    wrong = [f"  {m}: no weight of the model" for m in modules if m not in known]
    wrong += [line for weight in found for line in _unfit(weight, modules)]
    if wrong:
        raise ValueError(
            "The factors cannot be kept beside the weights (merging them may do):\n"
            + "\n".join(wrong)
        )
    return tuple(found)


def adaptable(base: WeightMapping, *, transposed: bool) -> tuple[Adapted, ...]:
    """Returns all weights of the tree that can have factors beside them.

    Args:
      base: Mapping of the base model.
      transposed: Whether the base model stores weights as `[in, out]`.
    """
    found = [w for r in base.rules if (w := _weight(r, base, transposed)) is not None]
    return tuple(w for w in found if not any(_unfit(w, w.modules)))


def _weight(rule: Rule, base: WeightMapping, transposed: bool) -> Adapted | None:
    if not rule.sources[0].endswith(".weight"):
        return None
    pieces = list(rule.pieces(base.sizes))
    names = dict.fromkeys(piece.source.removesuffix(".weight") for piece in pieces)
    num_stacked = len(pieces[0].destination_box) - len(rule.layouts[0].destination)
    stacked = pieces[0].destination_shape[:num_stacked]
    return Adapted(rule, tuple(names), stacked, transposed)


def _unfit(weight: Adapted, modules: Collection[str]) -> Iterator[str]:
    rule, stem = weight.rule, _stem(weight.rule)
    if len(rule.sources) > 1 or len(rule.destinations) > 1:
        yield f"  {stem}: its weight is cut, or joined with others, in the tree"
    elif not _is_separable(rule.layouts[0]):
        yield f"  {stem}: its weight is not a matrix whose two sides stay apart"
    elif left := [module for module in weight.modules if module not in modules]:
        yield f"  {stem}: stacked in the tree, and not adapted in {', '.join(left)}"


def _stem(rule: Rule) -> str:
    return rule.sources[0].removesuffix(".weight")


def _is_separable(layout: Layout) -> bool:
    return len(layout.source) == 2 and len(layout.destination) == sum(
        len(_within(layout, side)) for side in layout.source
    )


def _within(layout: Layout, side: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns the destination dims whose factors all are in one source dim."""
    return [dim for dim in layout.destination if set(dim) <= set(side)]


def _text(side: Side | list[tuple[str, ...]]) -> str:
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in side)
