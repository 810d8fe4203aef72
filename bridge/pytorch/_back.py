"""Inverse of a mapping, in memory: from leaves to tensors."""

from collections.abc import Mapping

import numpy as np

from bridge._box import as_index
from bridge._cast import check_range
from bridge.formats._source import Source
from bridge.rules._mapping import Mapping as WeightMapping


def follow_back(
    mapping: WeightMapping,
    leaves: Mapping[str, np.ndarray],
    like: Source | None = None,
) -> dict[str, np.ndarray]:
    """Returns the tensors of a mapping, converted from leaves.

    Args:
      mapping: Rules between tensors and leaves.
      leaves: Leaves of the tree by path.
      like: Source whose dtypes the tensors get; None for the dtypes of the leaves.

    Raises:
      ValueError: If a tensor is made of leaves of several dtypes and `like` is None.
    """
    pieces = mapping.by_source()
    dtypes = {key: {leaves[p.destination].dtype for p in pieces[key]} for key in pieces}
    mixed = [key for key, found in dtypes.items() if len(found) > 1]
    if like is None and mixed:
        raise ValueError(
            f"{', '.join(mixed)}: made of leaves of several dtypes. Pass `like`, whose "
            "dtypes are used."
        )
    arrays = {}
    for key, parts in pieces.items():
        integers = parts[0].integers
        own = np.dtype(integers) if integers else max(dtypes[key], key=str)
        dtype = own if like is None else like.dtype(key)
        arrays[key] = np.empty(parts[0].source_shape, dtype)
        for piece in parts:
            section = leaves[piece.destination][as_index(piece.destination_box)]
            values = np.asarray(piece.to_source(section))
            check_range(values, arrays[key].dtype, key)
            arrays[key][as_index(piece.source_box)] = values
    return arrays
