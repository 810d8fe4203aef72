"""Parts of weights found in the ranks' flat buffers, merged into unsharded weights."""

from collections.abc import Mapping
from typing import Any

from bridge.megatron._pipeline import Pipeline
from bridge.megatron._rank_buffers import split_in
from bridge.megatron._tensor_parallel import Split, merge
from bridge.megatron._views import Replicated, Tensor

KINDS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Kinds of state by the name that flat buffers use."""

Parts = dict[str, dict[tuple[int, int], dict[str, Tensor]]]
"""Tensors by canonical name, by data-parallel group and tensor-parallel rank, by kind
as flat buffers name it."""


def merge_parts(
    parts: Parts, args: Mapping[str, Any], pipeline: Pipeline
) -> dict[str, dict[str, Tensor]]:
    """Merges the tensor-parallel ranks' parts of each weight's state.

    Args:
      parts: Parts of all ranks.
      args: Settings of the run.
      pipeline: Distribution of layers and experts over ranks.

    Returns:
      Lazy tensors by kind (`"master"`, `"exp_avg"`, `"exp_avg_sq"`) and canonical name.
      Copies on several ranks are compared when they are read.
    """
    return {
        kind: {
            name: _merge(name, on_disk, ranks, args, pipeline)
            for name, ranks in parts.items()
        }
        for on_disk, kind in KINDS.items()
    }


def _merge(
    name: str,
    kind: str,
    ranks: Mapping[tuple[int, int], Mapping[str, Tensor]],
    args: Mapping[str, Any],
    pipeline: Pipeline,
) -> Tensor:
    split, tp = split_in(name, args, pipeline), pipeline.sizes.tp
    # Ranks are numbered with tp innermost, so each run of `tp` parts is one tensor.
    found = [(group, ranks[group, t][kind]) for group, t in sorted(ranks)]
    if split is not Split.NONE:
        found = [
            (found[n][0], merge([part for _, part in found[n : n + tp]], split))
            for n in range(0, len(found), tp)
        ]
    copies = tuple((f"{kind} of rank {group}", tensor) for group, tensor in found)
    return copies[0][1] if len(copies) == 1 else Replicated(copies)
