"""What layers read of the positions of tokens."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Table = Float[Array, "batch seq half_rope_dim"]


class PositionTables(NamedTuple):
    """Tables of positions, computed once for all layers.

    Where layers differ, all but `steps` have a leading dim, of which `pick` takes an
    index.

    Attributes:
      cos: Cosines of the angles of a rope; None without a rope.
      sin: Sines of the angles; None without a rope.
      query_scale: Factor of each query; None for 1.
      chunk_start: First position that each query attends to; None for 0.
      has_rope: Whether the layer applies a rope; None where nothing depends on it.
      steps: Positions as two summands that are exact in bfloat16, a multiple of
        `STEP` and the rest; None without ALiBi.
      full: Cosines and sines of full-attention layers whose heads have another width;
        None for the same.
    """

    cos: Table | None = None
    sin: Table | None = None
    query_scale: Float[Array, "batch seq"] | None = None
    chunk_start: Int[Array, "batch seq"] | None = None
    has_rope: Bool[Array, ""] | None = None
    steps: Float[Array, "batch seq 2"] | None = None
    full: "tuple[Table, Table] | None" = None

    def of_full(self) -> "PositionTables":
        """Returns the tables of full-attention layers with sizes of their own."""
        assert self.full is not None
        return PositionTables(*self.full)

    def pick(self, index: Int[Array, ""]) -> "PositionTables":
        """Returns the tables of a layer.

        Args:
          index: Index of the layer's tables.
        """
        stacked = self._replace(steps=None)
        picked = jax.tree.map(
            lambda table: jax.lax.dynamic_index_in_dim(table, index, keepdims=False),
            stacked,
        )
        return picked._replace(steps=self.steps)


STEP = 256
"""Number from which on bfloat16 does not distinguish all integers."""


def alibi_slopes(heads: int, largest: float) -> tuple[float, ...]:
    """Returns the factor of the distance in each head's scores.

    For a power of two a geometric series down to `2 ** -largest`; else every second of
    the series of the next power of two, then the others.

    Args:
      heads: Number of heads.
      largest: Exponent of the least slope.

    Source: ALiBi, https://arxiv.org/abs/2108.12409; transformers
      `modeling_bloom.py::_get_alibi_slopes`,
      `modeling_mpt.py::build_mpt_alibi_tensor`.
    """
    count = 1 << (heads - 1).bit_length()
    slopes = 2.0 ** -(np.arange(1, count + 1) * largest / count)
    if count != heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:heads]
    return tuple(slopes.tolist())
