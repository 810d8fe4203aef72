"""Weighted sums of checkpoints, computed as they are written."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from bridge._box import Box, as_index, complete
from bridge._cast import check_range
from bridge._report import format_report
from bridge._tree import arrays_of, named_leaves

# Weights of several decimals, as people type them, add up to 1 within this.
_SUM_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class MergedLeaf:
    """Weighted sum of leaves, of which each box is read from all of them.

    Args:
      name: Dotted path of the leaf, for error messages.
      leaves: Leaves of one shape: lazy, or arrays.
      weights: Weight of each leaf.
      dtype: Dtype of the sum.
    """

    name: str
    leaves: tuple[Any, ...]
    weights: tuple[float, ...]
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return tuple(self.leaves[0].shape)

    def read(self, box: Box) -> np.ndarray:
        """Reads a box, sums it in float32 (or wider) and rounds it once.

        Raises:
          ValueError: If leaves that are not floating-point numbers differ.
        """
        parts = [
            (np.asarray(leaf[as_index(box)]), weight)
            for leaf, weight in zip(self.leaves, self.weights, strict=True)
            if weight
        ]
        if not jnp.issubdtype(self.dtype, jnp.floating):
            if any(not np.array_equal(part, parts[0][0]) for part, _ in parts):
                raise ValueError(
                    f"'{self.name}' of {self.dtype} differs between the "
                    "trees, and its dtype has no mean."
                )
            return parts[0][0]
        if len(parts) == 1 and parts[0][1] == 1:
            return parts[0][0].astype(self.dtype)
        width = np.promote_types(np.float32, self.dtype)
        total = np.zeros(parts[0][0].shape, width)
        for part, weight in parts:
            total += part.astype(width) * width.type(weight)
        check_range(total, self.dtype, self.name)
        return total.astype(self.dtype)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the region selected by slices."""
        return self.read(complete(index, self.shape))


def merge(trees: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
    """Returns the weighted sum of trees, to be saved tensor by tensor.

    Args:
      trees: Trees of one structure, as `lazy_hf` returns them, or of arrays.
      weights: Weight of each tree; they add up to 1. None means equal weights.

    Returns:
      Leaves by dotted path, each in the dtype of the first tree's.

    Raises:
      ValueError: If weights do not add up to 1, or the trees have other leaves or
        shapes; all mismatches are listed.

    Examples:
      >>> tree, config = bridge.lazy_hf("small-llama")
      >>> mean = bridge.merge([tree, params], weights=[0.25, 0.75])
      >>> bridge.save_hf(path, mean, config)
    """
    if not trees:
        raise ValueError("There are 0 trees to merge: give at least 1.")
    weights = [1 / len(trees)] * len(trees) if weights is None else list(weights)
    total = math.fsum(weights)
    if len(weights) != len(trees) or not abs(total - 1) <= _SUM_TOLERANCE:
        raise ValueError(
            f"{len(weights)} weights that add up to {total:g} for {len(trees)} trees: "
            "give one for each, which add up to 1."
        )
    named = [named_leaves(arrays_of(tree)) for tree in trees]
    _check(named)
    return {
        name: MergedLeaf(
            name,
            tuple(leaves[name] for leaves in named),
            tuple(weights),
            np.dtype(leaf.dtype),
        )
        for name, leaf in named[0].items()
    }


def _check(named: Sequence[dict[str, Any]]) -> None:
    first, *others = named
    wrong: dict[str, list[str]] = {}
    for number, leaves in enumerate(others, 1):
        odd = sorted(first.keys() ^ leaves.keys())
        wrong[f"not in both tree 0 and tree {number}"] = odd
        wrong[f"of other shape in tree {number}"] = [
            f"{name}: {leaf.shape}, not {first[name].shape}"
            for name, leaf in leaves.items()
            if name in first and tuple(leaf.shape) != tuple(first[name].shape)
        ]
    if any(wrong.values()):
        raise ValueError(f"The trees are not of one model:\n{format_report(wrong)}")
