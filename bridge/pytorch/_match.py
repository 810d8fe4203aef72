"""Pairs of layers of two models, by their names."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from bridge.pytorch._torch_layers import TorchLayer
from bridge.pytorch._tree_layers import TreeLayer, kind_of_names


@dataclasses.dataclass(frozen=True)
class Match:
    """Two layers that may be one.

    Args:
      theirs: Layer of the PyTorch model; its path holds `{layer}` if it stands for
        several, which are stacked in the tree.
      ours: Layer of the JAX model, without the dim of stacked layers.
      doubts: Reasons to review the pair; empty if their names are the same.
    """

    theirs: TorchLayer
    ours: TreeLayer
    doubts: tuple[str, ...] = ()


def matches(theirs: Sequence[TorchLayer], ours: Sequence[TreeLayer]) -> list[Match]:
    """Returns the pairs of layers, each layer in one pair at most.

    Names are the same, or the same behind a prefix that one of the two models has
    before the names of several layers. Failing that, in doubt, layers have the same
    numbers and the same last name. Every pair is the only one of its kind.
    """
    found = _equal(theirs, ours)
    for find in (_stacked, _behind_prefix, _same_end):
        used = {id(layer) for match in found for layer in (match.theirs, match.ours)}
        paths = {path for match in found for path in _paths_of(match, theirs)}
        rest = [t for t in theirs if id(t) not in used and t.path not in paths]
        taken = {match.ours.path for match in found}
        found += find(rest, [o for o in ours if o.path not in taken])
    order = {layer.path: number for number, layer in enumerate(theirs)}
    return sorted(found, key=lambda match: order.get(_first(match.theirs.path), 0))


def canonical(path: str) -> str:
    """Returns the canonical form of a path, without naming conventions of frameworks.

    linen's `layers_0` becomes `layers.0`; the `layers` of flax's `Sequential`, the
    `cell` of its `RNN`, and prefixes of collections and wrappers are removed.
    """
    path = _without_wrappers(path)
    path = re.sub(r"(^|\.)layers\.(?=\d)", r"\1", path)
    return re.sub(r"\.cell$", "", path)


def _without_wrappers(path: str) -> str:
    path = re.sub(r"_(\d+)(?=\.|$)", r".\1", path)
    return re.sub(r"^((params|batch_stats|module|_orig_mod)(\.|$))+", "", path)


def _equal(theirs: Sequence[TorchLayer], ours: Sequence[TreeLayer]) -> list[Match]:
    """Pairs layers whose canonical name is unique on each side."""
    left, right = _by_name(theirs), _by_name(ours)
    return [
        Match(layers[0], other[0])
        for name, layers in left.items()
        if len(layers) == 1 == len(other := right.get(name, []))
    ]


def _behind_prefix(
    theirs: Sequence[TorchLayer], ours: Sequence[TreeLayer]
) -> list[Match]:
    """Pairs layers of which one has the other's name, behind a prefix."""
    left, right = _by_name(theirs), _by_name(ours)
    pairs = [(t, o, p) for t, o, p in _suffixes(left, right)]
    pairs += [(t, o, p) for o, t, p in _suffixes(right, left)]
    uses = collections.Counter(
        id(layer) for t, o, _ in pairs for layer in (left[t][0], right[o][0])
    )
    prefixes = collections.Counter(prefix for _, _, prefix in pairs)
    return [
        Match(left[t][0], right[o][0], () if prefixes[prefix] > 1 else _renamed(t, o))
        for t, o, prefix in pairs
        if len(left[t]) == 1 == len(right[o])
        if uses[id(left[t][0])] == 1 == uses[id(right[o][0])]
    ]


def _suffixes(
    longer: Mapping[str, Sequence], shorter: Mapping[str, Sequence]
) -> Iterator[tuple[str, str, str]]:
    """Yields names, the names that they end in, and what is before; never a number."""
    for name in longer:
        parts = name.split(".")
        for start in range(1, len(parts)):
            if parts[start - 1].isdigit():
                break
            if (end := ".".join(parts[start:])) in shorter:
                yield name, end, ".".join(parts[:start])


def _same_end(theirs: Sequence[TorchLayer], ours: Sequence[TreeLayer]) -> list[Match]:
    """Pairs layers of the same numbers and last name, in doubt."""
    left, right = _by_name(theirs, _numbers_and_end), _by_name(ours, _numbers_and_end)
    return [
        Match(layers[0], other[0], _renamed(layers[0].path, other[0].path))
        for name, layers in left.items()
        if len(layers) == 1 == len(other := right.get(name, []))
    ]


def _numbers_and_end(path: str) -> str:
    parts = canonical(path).split(".")
    return ".".join([*filter(str.isdigit, parts), parts[-1]])


def _renamed(theirs: str, ours: str) -> tuple[str, ...]:
    return (f"called {theirs} in PyTorch, {ours} in the tree",)


def _stacked(theirs: Sequence[TorchLayer], ours: Sequence[TreeLayer]) -> list[Match]:
    """Pairs numbered layers with one whose leaves have a dim of as many more."""
    groups: dict[str, list[TorchLayer]] = collections.defaultdict(list)
    for layer in theirs:
        if len(numbers := re.findall(r"(?:^|\.)(\d+)(?=\.|$)", layer.path)) == 1:
            groups[
                re.sub(rf"(^|\.){numbers[0]}(?=\.|$)", r"\1{layer}", layer.path)
            ] += [layer]
    names = {_without_wrappers(layer.path): layer for layer in ours}
    found = []
    for path, layers in groups.items():
        parts = path.replace(".{layer}", "").split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts) - 1)]
        tree = next((names[end] for end in ends if end in names), None)
        if tree is not None and _are_of(layers, tree):
            theirs_of_all = TorchLayer(path, layers[0].kind, layers[0].shapes)
            found.append(Match(theirs_of_all, _one_of(tree)))
    uses = collections.Counter(match.ours.path for match in found)
    return [match for match in found if uses[match.ours.path] == 1]


def _are_of(layers: Sequence[TorchLayer], tree: TreeLayer) -> bool:
    """Whether the leaves of a layer have a place for each of several equal ones."""
    alike = all(
        (layer.kind, layer.shapes) == (layers[0].kind, layers[0].shapes)
        for layer in layers
    )
    sizes = {shape[:1] for shape in tree.shapes.values()}
    return alike and sizes == {(len(layers),)}


def _one_of(tree: TreeLayer) -> TreeLayer:
    """Returns a layer of a stack."""
    shapes = {name: shape[1:] for name, shape in tree.shapes.items()}
    kind = kind_of_names(shapes) if tree.by == "names" else tree.kind
    return dataclasses.replace(tree, kind=kind, shapes=shapes)


def _paths_of(match: Match, theirs: Sequence[TorchLayer]) -> list[str]:
    """Returns the paths of all layers that a match stands for."""
    if "{layer}" not in match.theirs.path:
        return [match.theirs.path]
    before, after = map(re.escape, match.theirs.path.split("{layer}"))
    regex = re.compile(rf"{before}\d+{after}")
    return [layer.path for layer in theirs if regex.fullmatch(layer.path)]


def _first(path: str) -> str:
    return path.replace("{layer}", "0")


def _by_name(layers: Sequence, name=canonical) -> dict[str, list]:
    groups: dict[str, list] = collections.defaultdict(list)
    for layer in layers:
        groups[name(layer.path)].append(layer)
    return dict(groups)
