"""Doubts that a pair of layers cannot have by itself: shapes, and the whole model."""

import dataclasses
from collections.abc import Mapping, Sequence

from bridge import adapt
from bridge.pytorch._pair import Row
from bridge.pytorch._sizes import settle
from bridge.pytorch._spoken import spell_out
from bridge.pytorch._torch_layers import TorchLayer
from bridge.pytorch._tree_layers import TreeLayer

Shapes = Mapping[str, tuple[int, ...]]


def contradicted(row: Row, tensors: Shapes, leaves: Shapes) -> Row:
    """Adds what shapes and names say against a row.

    Args:
      row: A row that names something of the source.
      tensors: Shapes of the source by name, derived tensors in their places.
      leaves: Shapes of the tree by path.
    """
    doubts = list(row.doubts)
    for sized in spell_out([row.rule], {}):
        doubts += settle(sized.rule, tensors, leaves, sized.sizes)[1]
        names = [name for name in sized.rule.sources if name not in tensors]
        names += [path for path in sized.rule.destinations if path not in leaves]
        doubts += [f"there is no {name}" for name in names]
    return dataclasses.replace(row, doubts=tuple(doubts))


def flattened(row: Row, layer: TorchLayer, channels: Sequence[int], by: str) -> Row:
    """Doubts a linear whose input may be a flattened feature map.

    PyTorch flattens channels first, flax channels last, and neither class nor shape
    tells what a linear is fed with. equinox has channels first too.
    """
    if row.make is not adapt.linear or by == "equinox":
        return row
    width = layer.shapes["weight"][-1]
    found = [c for c in channels if width > c and width % c == 0]
    if not found:
        return row
    doubt = f"fed with a flattened feature map? then flattened=({found[0]}, ...)"
    return dataclasses.replace(row, doubts=(*row.doubts, doubt))


def channels_of(layers: Sequence[tuple[TorchLayer, TreeLayer]]) -> list[int]:
    """Returns the channels that the convolutions of a model put out."""
    return [
        theirs.shapes["weight"][1 if "Transpose" in f"{theirs.kind}{ours.kind}" else 0]
        for theirs, ours in layers
        if ours.kind in ("Conv", "ConvTranspose", "Kernel")
        and "weight" in theirs.shapes
    ]
