"""Doubts about a proposed row that follow from shapes and from the full model."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from bridge import adapt
from bridge.pytorch._covered import matching, spell_out
from bridge.pytorch._pair import Row
from bridge.pytorch._sizes import settle
from bridge.pytorch._torch_layers import TorchLayer
from bridge.pytorch._tree_layers import TreeLayer

Shapes = Mapping[str, tuple[int, ...]]


def contradicted(row: Row, tensors: Shapes, leaves: Shapes) -> Row:
    """Adds the contradictions between a row and the given shapes and names.

    Args:
      row: Proposed row that names at least one tensor of the source.
      tensors: Tensor shapes of the source by name, including derived tensors.
      leaves: Leaf shapes of the tree by path.
    """
    doubts = list(row.doubts)
    for sized in spell_out([row.rule], {}):
        doubts += settle(sized.rule, tensors, leaves, sized.sizes)[1]
        names = [n for n in sized.rule.sources if not matching(n, tensors)]
        names += [path for path in sized.rule.destinations if path not in leaves]
        doubts += [f"there is no {name}" for name in names]
        doubts += [_REMOVE for name in names if _is_made(name, tensors)]
    return dataclasses.replace(row, doubts=tuple(doubts))


_REMOVE = (
    "PyTorch makes it of others: remove_parametrizations, remove_weight_norm or "
    "remove_spectral_norm of torch.nn.utils first"
)


def _is_made(name: str, tensors: Shapes) -> bool:
    """Returns whether a weight is computed from the tensors that there are."""
    path, dot, last = name.rpartition(".")
    made = (f"{path}{dot}parametrizations.{last}.", f"{name}_g", f"{name}_orig")
    return any(key.startswith(made) for key in tensors)


@dataclasses.dataclass(frozen=True)
class FeatureMaps:
    """What the convolutions of a model put out.

    Attributes:
      channels: Number of channels of each, in the order of the model.
      dims: Most spatial dims that one of them has.
    """

    channels: tuple[int, ...]
    dims: int

    def of_width(self, width: int) -> int | None:
        """Returns the channels of a map that may have this width flattened, or None.

        Maps of convolutions that follow each other may be concatenated.
        """
        of_one = (n for n in self.channels if width > n and width % n == 0)
        first = range(len(self.channels))
        runs = (itertools.accumulate(self.channels[i:]) for i in first)
        of_several = (n for run in runs for n in run if width > n and width % n == 0)
        return next(itertools.chain(of_one, of_several), None)


def flattened(row: Row, layer: TorchLayer, maps: FeatureMaps, by: str) -> Row:
    """Adds a doubt to a layer whose input may be a flattened feature map.

    PyTorch flattens channels first, flax channels last, and neither class nor shape
    shows whether the input was flattened. equinox also has channels first. Linear and
    recurrent layers are in doubt, a norm if its width is no number of channels, and a
    convolution if it has fewer dims than another one.
    """
    is_recurrent = row.make in (adapt.lstm, adapt.gru)
    shape = layer.shapes.get("weight_ih_l0" if is_recurrent else "weight", ())
    if by == "equinox" or not shape:
        return row
    # [out, in, ...] but of a norm, which has one dim.
    width = shape[0] if len(shape) == 1 else shape[1]
    channels = None
    if row.make is adapt.linear or is_recurrent:
        channels = maps.of_width(width)
    elif row.make is adapt.norm and width not in maps.channels:
        channels = maps.of_width(width)
    elif row.make is adapt.conv and 2 < len(shape) < 2 + maps.dims:
        channels = maps.of_width(width)
    if channels is None:
        return row
    mend = (
        f"then flattened=({channels}, ...)"
        if row.make is adapt.linear
        else f"then a Rule with (channels ...), channels {channels} perhaps"
    )
    doubt = f"fed with a flattened feature map? {mend}"
    return dataclasses.replace(row, doubts=(*row.doubts, doubt))


def unflattened(
    row: Row, layer: TorchLayer, behind: tuple[TorchLayer, TreeLayer] | None
) -> Row:
    """Adds a doubt to a linear layer whose output may be reshaped into a feature map.

    As in decoders: PyTorch reshapes to channels first, flax to channels last.

    Args:
      row: Proposed row of the layer.
      layer: Layer of PyTorch.
      behind: Convolution that comes next, from `convolutions_behind`.
    """
    width = layer.shapes.get("weight", (0,))[0]
    if row.make is not adapt.linear or behind is None or width == 0:
        return row
    kernel = behind[0].shapes["weight"]
    channels = kernel[0 if _is_transposed(*behind) else 1]
    # A map of two pixels a dim at least: a scale and a shift of channels is none.
    if width % channels or width // channels < 2 ** (len(kernel) - 2):
        return row
    doubt = (
        "put into a feature map? then a Rule with (channels ...), "
        f"channels {channels} perhaps"
    )
    return dataclasses.replace(row, doubts=(*row.doubts, doubt))


def convolutions_behind(
    layers: Sequence[tuple[TorchLayer, TreeLayer]],
) -> list[tuple[TorchLayer, TreeLayer] | None]:
    """Returns, for each layer, the convolution that comes next, norms aside.

    None where another layer or nothing does, and for layers of equinox, which has
    channels first as PyTorch.
    """
    found: list[tuple[TorchLayer, TreeLayer] | None] = []
    behind: tuple[TorchLayer, TreeLayer] | None = None
    for theirs, ours in reversed(layers):
        found.append(None if ours.by == "equinox" else behind)
        if _is_convolution(theirs, ours):
            behind = theirs, ours
        elif max(map(len, theirs.shapes.values()), default=0) > 1:  # no norm
            behind = None
    return found[::-1]


def dims_confirmed(
    rows: Sequence[tuple[TorchLayer, TreeLayer, Row]],
) -> list[Row]:
    """Removes the doubt about square kernels that the tree's other kernels settle.

    A tree without classes has only names. If each kernel that is not square fits
    `[in, out]` of a layer of class `Linear`, so do those that are.

    Args:
      rows: Pairs of layers with their rows.
    """
    kernels = [
        not row.doubts
        for theirs, ours, row in rows
        if _is_linear(theirs, ours)
        if len(set(theirs.shapes.get("weight", ()))) > 1
    ]
    if not kernels or not all(kernels):
        return [row for _, _, row in rows]
    return [
        dataclasses.replace(
            row, doubts=tuple(d for d in row.doubts if not d.startswith("square"))
        )
        if _is_linear(theirs, ours)
        else row
        for theirs, ours, row in rows
    ]


def _is_linear(theirs: TorchLayer, ours: TreeLayer) -> bool:
    return theirs.kind == "Linear" == ours.kind and ours.by == "names"


def _is_convolution(theirs: TorchLayer, ours: TreeLayer) -> bool:
    return (
        ours.kind in ("Conv", "ConvTranspose", "Kernel")
        and len(theirs.shapes.get("weight", ())) > 2  # no kernel of heads
    )


def _is_transposed(theirs: TorchLayer, ours: TreeLayer) -> bool:
    # Either side may know no class.
    return "Transpose" in f"{theirs.kind}{ours.kind}"


def feature_maps(layers: Sequence[tuple[TorchLayer, TreeLayer]]) -> FeatureMaps:
    """Returns what the convolutions of a model put out."""
    found = [(theirs, ours) for theirs, ours in layers if _is_convolution(theirs, ours)]
    channels = tuple(
        theirs.shapes["weight"][1 if _is_transposed(theirs, ours) else 0]
        for theirs, ours in found
    )
    dims = [len(theirs.shapes["weight"]) - 2 for theirs, _ in found]
    return FeatureMaps(channels, max(dims, default=0))
