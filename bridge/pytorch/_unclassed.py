"""Rows of tensors that no adapter covers: parameters, and layers of unknown classes."""

import math
from collections.abc import Sequence

from bridge.pytorch._pair import Row
from bridge.pytorch._torch_layers import TorchLayer
from bridge.pytorch._tree_layers import TreeLayer
from bridge.rules._rules import Rule

Shape = tuple[int, ...]


def as_it_is(key: str, leaf: str, shape: Shape, wanted: Shape) -> Row:
    """Returns the row of a tensor and a leaf of the same name.

    Args:
      key: Name of the tensor.
      leaf: Path of the leaf.
      shape: Shape of the tensor.
      wanted: Shape of the leaf.
    """
    layout, doubts = _layout(shape, wanted), []
    sizes = _without_ones(shape)
    if sizes != _without_ones(wanted) or (shape != wanted and not (shape and wanted)):
        doubts.append(f"{shape} in PyTorch, {wanted} in the tree")
    elif len(set(sizes)) < len(sizes):
        doubts.append(f"{shape}, and no class says which dim is which")
    return Row(Rule, "bridge.Rule", (key, leaf, layout), {}, tuple(doubts))


def linear_general(theirs: TorchLayer, ours: TreeLayer) -> list[Row]:
    """Returns the rows of a linear layer whose kernel has several dims on one side.

    Its inputs or outputs are `(heads, head_dim)` in flax: `DenseGeneral`,
    `LinearGeneral`. None if it is not such a layer.

    Args:
      theirs: Layer of the PyTorch model.
      ours: Layer of the JAX model.
    """
    weight, kernel = theirs.shapes.get("weight", ()), ours.shapes.get("kernel", ())
    if len(weight) != 2 or len(kernel) < 3:
        return []
    splits = [
        at
        for at in range(1, len(kernel))
        if (math.prod(kernel[at:]), math.prod(kernel[:at])) == weight
    ]
    if not splits:
        return []
    doubts = ["which dims are inputs?"] * (len(splits) > 1)
    if theirs.kind is None and len(set(weight)) == 1:
        doubts.append(f"square, {weight}, and of no known class in PyTorch")
    dims = [f"d{dim}" for dim in range(len(kernel))]
    inputs, outputs = dims[: splits[0]], dims[splits[0] :]
    layout = f"{_grouped(outputs)} {_grouped(inputs)} -> {' '.join(dims)}"
    layouts = {("weight", "kernel"): layout}
    if "bias" in theirs.shapes and "bias" in ours.shapes:
        layouts["bias", "bias"] = f"{_grouped(outputs)} -> {' '.join(outputs)}"
    return [
        Row(
            Rule,
            "bridge.Rule",
            (f"{theirs.path}.{key}", f"{ours.path}.{leaf}", text),
            {},
            tuple(doubts),
        )
        for (key, leaf), text in layouts.items()
    ]


def _layout(shape: Shape, wanted: Shape) -> str:
    """Returns a layout that shapes allow, to be reviewed where they are not equal."""
    if len(shape) == 2 and shape != wanted:
        rows, columns = shape
        if wanted == (columns, rows):
            return "d0 d1 -> d1 d0"
        if len(wanted) == 3 and wanted[0] == columns:
            return "(d1 d2) d0 -> d0 d1 d2"
        if len(wanted) == 3 and wanted[-1] == rows:
            return "d2 (d0 d1) -> d0 d1 d2"
    alike = shape and wanted and _without_ones(shape) == _without_ones(wanted)
    if shape != wanted and alike:
        return _between_ones(shape, wanted) or _around_ones(shape, wanted)
    dims = " ".join(f"d{dim}" for dim in range(len(shape)))
    return f"{dims} -> {dims}"


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _around_ones(shape: Shape, wanted: Shape) -> str:
    """Returns the layout of shapes whose dims of size 1 are in other places."""
    source = [[f"d{dim}"] for dim in range(len(shape))]
    sized = [f"d{dim}" for dim, size in enumerate(shape) if size != 1]
    ones = [f"d{dim}" for dim, size in enumerate(shape) if size == 1]
    target = []
    for dim, size in enumerate(wanted):
        if size != 1:
            target.append([sized.pop(0)])
        elif ones:
            target.append([ones.pop(0)])
        else:
            source[0].append(f"e{dim}")
            target.append([f"e{dim}"])
    target[0] += ones
    return " -> ".join(" ".join(map(_grouped, side)) for side in (source, target))


def _between_ones(shape: Shape, wanted: Shape) -> str | None:
    """Returns the layout of shapes that differ in dims of size 1, which are grouped.

    None if they are not the dims of the shorter shape, and others of size 1.
    """
    if len(shape) == len(wanted):
        return None
    longer, shorter = (shape, wanted) if len(shape) > len(wanted) else (wanted, shape)
    dims = [f"d{dim}" for dim in range(len(longer))]
    groups: list[list[str]] = [[]]
    for dim, size in zip(dims, longer, strict=True):
        # A dim of the shorter shape ends behind each dim of more than one.
        groups[-1].append(dim)
        if size != 1:
            groups.append([])
    *groups, rest = groups
    if not groups or len(groups) != len(shorter):
        return None
    groups[-1] += rest
    one, other = " ".join(dims), " ".join(map(_grouped, groups))
    return f"{one} -> {other}" if longer is shape else f"{other} -> {one}"


def _grouped(dims: Sequence[str]) -> str:
    return dims[0] if len(dims) == 1 else f"({' '.join(dims)})"
