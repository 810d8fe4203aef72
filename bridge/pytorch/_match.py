"""Pairs of layers of two models, by their names."""

import collections
import dataclasses
import functools
import re
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)

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
    before the names of several layers, or the same in two lists of other names.
    Failing that, in doubt, layers have the same last name, and the same numbers unless
    one of them has none. Every pair is the only one of its kind.
    """
    found = _each_once(theirs, ours, (_equal, _stacked))
    behind = functools.partial(_behind_prefix, known=_prefixes(found))
    finders = (behind, _in_lists, _same_end, _only_end)
    found = _each_once(theirs, ours, finders, found)
    order = {layer.path: number for number, layer in enumerate(theirs)}
    return sorted(found, key=lambda match: order.get(_first(match.theirs.path), 0))


def matches_of_tensors(
    theirs: Sequence[TorchLayer], ours: Sequence[TreeLayer], found: Sequence[Match]
) -> list[Match]:
    """Returns the pairs of tensors and leaves that belong to no layer of a class.

    Args:
      theirs: Tensors, each as a layer with its name as path.
      ours: Leaves, each as a layer with its path.
      found: Pairs of layers: a prefix of these needs no other evidence.
    """
    behind = functools.partial(_behind_prefix, known=_prefixes(found))
    return _each_once(theirs, ours, (_equal, _stacked, behind, _in_lists))


def _each_once(
    theirs: Sequence[TorchLayer],
    ours: Sequence[TreeLayer],
    finders: Sequence[Callable],
    found: Sequence[Match] = (),
) -> list[Match]:
    """Lets each finder pair what `found` and the finders before it left."""
    pairs = list(found)
    for find in finders:
        used = {id(layer) for match in pairs for layer in (match.theirs, match.ours)}
        paths = {path for match in pairs for path in _paths_of(match, theirs)}
        rest = [t for t in theirs if id(t) not in used and t.path not in paths]
        taken = {match.ours.path for match in pairs}
        pairs += find(rest, [o for o in ours if o.path not in taken])
    return pairs


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
    """Pairs layers whose canonical name is unique on each side.

    In doubt, if those of the same name are numbered otherwise: of the layers 0, 2 and
    4 of a `Sequential`, those that another framework calls 0, 1 and 2, 2 is not 2.
    """
    left, right = _by_name(theirs), _by_name(ours)
    of_left, of_right = _numbers(left), _numbers(right)
    return [
        Match(
            layers[0],
            other[0],
            _if_counted_otherwise(of_left[_any(name)], of_right[_any(name)]),
        )
        for name, layers in left.items()
        if len(layers) == 1 == len(other := right.get(name, []))
    ]


def _any(name: str) -> str:
    """Returns a name with its last number left out."""
    return re.sub(r"(^|\.)\d+(?!.*\.\d)(?=\.|$)", r"\1{}", name)


def _numbers(names: Iterable[str]) -> Mapping[str, tuple[int, ...]]:
    """Returns the last numbers of names, in order, by the name without them."""
    found: dict[str, set[int]] = collections.defaultdict(set)
    for name in names:
        numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
        found[_any(name)].update(map(int, numbers[-1:]))
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}


def _if_counted_otherwise(
    theirs: tuple[int, ...], ours: tuple[int, ...]
) -> tuple[str, ...]:
    if theirs == ours:
        return ()
    left, right = (", ".join(map(str, numbers)) for numbers in (theirs, ours))
    return (f"numbered {left} in PyTorch, {right} in the tree",)


def _prefixes(found: Sequence[Match]) -> frozenset[str]:
    """Returns what one of two names has before the other, of pairs of layers."""
    return frozenset(filter(None, map(_prefix_of, found)))


def _prefix_of(match: Match) -> str:
    one = canonical(match.theirs.path.replace(".{layer}", ""))
    other = canonical(match.ours.path)
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    end = f".{shorter}"
    return longer.removesuffix(end) if shorter and longer.endswith(end) else ""


def _behind_prefix(
    theirs: Sequence[TorchLayer],
    ours: Sequence[TreeLayer],
    known: Collection[str] = (),
) -> list[Match]:
    """Pairs layers of which one has the other's name, behind a prefix."""
    left, right = _by_name(theirs), _by_name(ours)
    pairs = [(t, o, p) for t, o, p in _suffixes(left, right)]
    pairs += [(t, o, p) for o, t, p in _suffixes(right, left)]
    uses = collections.Counter(
        id(layer) for t, o, _ in pairs for layer in (left[t][0], right[o][0])
    )
    prefixes = collections.Counter(prefix for _, _, prefix in pairs)
    certain = {*known, *_of_parameters(left, right), *_of_parameters(right, left)}
    prefixes.update({prefix: 2 for prefix in certain})
    return [
        Match(left[t][0], right[o][0], () if prefixes[prefix] > 1 else _renamed(t, o))
        for t, o, prefix in pairs
        if len(left[t]) == 1 == len(right[o])
        if uses[id(left[t][0])] == 1 == uses[id(right[o][0])]
    ]


def _of_parameters(longer: Mapping[str, Sequence], shorter: Mapping[str, Sequence]):
    """Returns the modules whose own parameters the other model has itself."""
    names = {name for layer in shorter.get("", ()) for name in layer.shapes}
    return {path for path in longer if path and names & set(longer[path][0].shapes)}


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


def _in_lists(theirs: Sequence[TorchLayer], ours: Sequence[TreeLayer]) -> list[Match]:
    """Pairs layers of equal number and name in two lists, whatever these are called."""
    left, right = _by_name(theirs, _in_list), _by_name(ours, _in_list)
    pairs = [
        (name, layers[0], other[0])
        for name, layers in left.items()
        if name and len(layers) == 1 == len(other := right.get(name, []))
    ]
    names: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for name, one, other in pairs:
        names[_list_of(one), _list_of(other)].add(name.partition(".")[2])
    return [
        Match(
            one,
            other,
            ()
            if len(names[_list_of(one), _list_of(other)]) > 1
            else _renamed(one.path, other.path),
        )
        for _, one, other in pairs
    ]


def _in_list(path: str) -> str:
    """Returns the first number of a path and what follows; empty if nothing does."""
    match = re.search(r"(?:^|\.)(\d+\..+)$", _without_wrappers(path))
    return match[1] if match else ""


def _list_of(layer: TorchLayer | TreeLayer) -> str:
    return layer.path.partition(_in_list(layer.path))[0]


def _same_end(
    theirs: Sequence[TorchLayer],
    ours: Sequence[TreeLayer],
    name: Callable[[str], str] | None = None,
) -> list[Match]:
    """Pairs layers of the same numbers and last name, in doubt."""
    name = name or _numbers_and_end
    left, right = _by_name(theirs, name), _by_name(ours, name)
    return [
        Match(layers[0], other[0], _renamed(layers[0].path, other[0].path))
        for end, layers in left.items()
        if len(layers) == 1 == len(other := right.get(end, []))
    ]


def _only_end(theirs: Sequence[TorchLayer], ours: Sequence[TreeLayer]) -> list[Match]:
    """Pairs layers of the same last name, one of which is in no list, in doubt.

    What only one of several layers has may be stored beside their stack.
    """
    found = _same_end(theirs, ours, lambda path: canonical(path).rpartition(".")[2])
    return [m for m in found if not (_in_list(m.theirs.path) and _in_list(m.ours.path))]


def _numbers_and_end(path: str) -> str:
    parts = canonical(path).split(".")
    return ".".join([*filter(str.isdigit, parts), parts[-1]])


def _renamed(theirs: str, ours: str) -> tuple[str, ...]:
    return (f"called {theirs} in PyTorch, {ours} in the tree",)


def _stacked(theirs: Sequence[TorchLayer], ours: Sequence[TreeLayer]) -> list[Match]:
    """Pairs numbered layers with one whose leaves have a dim of as many more."""
    groups: dict[str, list[TorchLayer]] = collections.defaultdict(list)
    for layer in theirs:
        for number in re.finditer(r"(?:^|(?<=\.))\d+(?=\.|$)", layer.path):
            start, end = layer.path[: number.start()], layer.path[number.end() :]
            groups[f"{start}{{layer}}{end}"].append(layer)
    names = {_without_wrappers(layer.path): layer for layer in ours}
    pairs = [
        (path, layers, tree)
        for path, layers in groups.items()
        if (tree := _stack_of(path, names)) is not None and _are_of(path, layers, tree)
    ]
    uses = collections.Counter(tree.path for _, _, tree in pairs)
    lists = collections.Counter(_lists_of(path, tree) for path, _, tree in pairs)
    return [
        Match(
            TorchLayer(path, layers[0].kind, layers[0].shapes),
            _one_of(tree),
            () if lists[_lists_of(path, tree)] > 1 else _unless_same(path, tree),
        )
        for path, layers, tree in pairs
        if uses[tree.path] == 1
    ]


def _stack_of(path: str, names: Mapping[str, TreeLayer]) -> TreeLayer | None:
    """Returns the only layer with a name in the place of `path` and its `{layer}`.

    The same name, or its end; else one that has the same after another list.
    """
    parts = path.replace(".{layer}", "").split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts) - 1)]
    tree = next((names[end] for end in ends if end in names), None)
    inside = path.partition("{layer}.")[2]
    if tree is not None or not inside:
        return tree
    others = [
        layer
        for name, layer in names.items()
        if re.fullmatch(rf"[^\d.]+\.{re.escape(inside)}", name)
    ]
    return others[0] if len(others) == 1 else None


def _lists_of(path: str, tree: TreeLayer) -> tuple[str, str]:
    before, _, inside = path.partition("{layer}")
    return before, _without_wrappers(tree.path).removesuffix(inside)


def _unless_same(path: str, tree: TreeLayer) -> tuple[str, ...]:
    """Returns a doubt if the lists of a stack have other names."""
    before, ours = _lists_of(path, tree)
    same = f".{before.rstrip('.')}".endswith(f".{ours}") or not ours
    return () if same else _renamed(path, tree.path)


def _are_of(path: str, layers: Sequence[TorchLayer], tree: TreeLayer) -> bool:
    """Whether the leaves of a layer have a place for each of several equal ones."""
    alike = all(
        (layer.kind, layer.shapes) == (layers[0].kind, layers[0].shapes)
        for layer in layers
    )
    paths = {path.replace("{layer}", str(number)) for number in range(len(layers))}
    sizes = {shape[:1] for shape in tree.shapes.values()}
    from_zero = paths == {layer.path for layer in layers}
    return alike and from_zero and sizes == {(len(layers),)}


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
