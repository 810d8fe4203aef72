"""Collectives over other axes, on the shards of arrays that XLA splits over `tp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec


def on_tp_shards(
    collective: Callable[..., Any], x: Any, dim: int | None, *others: Any
) -> Any:
    """Runs a collective over other axes on each tp rank's shard of an array.

    A step leaves `tp` to XLA, which would gather over `tp` before the collective, and
    so communicate tp times the bytes. A `shard_map` over `tp` around the collective
    alone prevents that.

    Args:
      collective: Function of `x` and `others` that uses no collective over `tp`.
      x: Array, or a tree of arrays that `tp` splits alike.
      dim: Dim that `tp` splits; None if all ranks of `tp` have the same.
      others: Arrays that all ranks of `tp` have.

    Returns:
      What `collective` returns, split along the same dim.
    """
    same = PartitionSpec()
    split = same if dim is None else PartitionSpec(*(None,) * dim, "tp")
    return jax.shard_map(
        collective,
        in_specs=(split, *(same for _ in others)),
        out_specs=split,
        axis_names={"tp"},
        check_vma=False,
    )(x, *others)


def num_automatic_tp() -> int:
    """Returns the ranks of `tp` that XLA manages at this point of a trace, or 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if "tp" in mesh.manual_axes else mesh.shape.get("tp", 1)
