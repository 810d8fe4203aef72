"""Tensor parallelism: the split of each weight over ranks, by canonical name.

Source: Megatron-LM megatron/core/tensor_parallel/layers.py::ColumnParallelLinear,
::RowParallelLinear; megatron/core/transformer/mlp.py::apply_swiglu_sharded_factory
"""

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bridge.megatron._views import Tensor, concatenate, rows


class Split(enum.Enum):
    """Split of a weight over tensor-parallel ranks."""

    NONE = "every rank keeps all of it"
    ROWS = "along dim 0"
    COLUMNS = "along dim 1"
    GATED = "along dim 0, gate and up each on its own"


_RULES = (
    (r"embedding\.word_embeddings\.weight", Split.ROWS),
    (r"output_layer\.(weight|bias)", Split.ROWS),
    (r".*\.linear_(qkv|q_proj|q_up_proj|kv_up_proj)\.(weight|bias)", Split.ROWS),
    (r".*\bsoftmax_offset", Split.ROWS),
    (r".*\.linear_fc1\.(weight|bias)", Split.GATED),
    (r".*\.linear_(proj|fc2)\.weight", Split.COLUMNS),
    (r".*\.linear_(proj|fc2)\.bias", Split.NONE),
    (r".*\.linear_(q|kv)_down_proj\.weight", Split.NONE),
    (r".*norm(_|\.)(weight|bias)", Split.NONE),
    (r".*\.router\.(weight|bias|expert_bias)", Split.NONE),
    (r".*\.shared_experts\.gate_weight", Split.NONE),
    (r"embedding\.position_embeddings\.weight", Split.NONE),
    (r"mtp\.layers\.\d+\.eh_proj\.weight", Split.ROWS),
)
_PATTERNS = [(re.compile(pattern), split) for pattern, split in _RULES]


def is_gated(args: Mapping[str, Any]) -> bool:
    """Returns whether a run's MLPs are gated, so that `linear_fc1` is gate and up."""
    names = ("swiglu", "quick_geglu", "gated_linear_unit")
    return any(args.get(name) for name in names)


def split_of(name: str, *, gated: bool) -> Split:
    """Returns the split of a weight over tensor-parallel ranks.

    Args:
      name: Canonical name of the weight.
      gated: Whether the model's MLPs have a gate.

    Raises:
      ValueError: If no rule covers the name.
    """
    for pattern, split in _PATTERNS:
        if pattern.fullmatch(name):
            return Split.ROWS if split is Split.GATED and not gated else split
    raise ValueError(
        f"no rule says how '{name}' is cut among tensor-parallel ranks; save with "
        "--ckpt-format torch_dist, whose tensors are unsplit"
    )


def merge(parts: Sequence[Tensor], split: Split) -> Tensor:
    """Merges the ranks' parts of a weight into a lazy tensor.

    Args:
      parts: Parts of the weight, one per rank, in rank order.
      split: Split that produced the parts. `Split.NONE` is not accepted: its parts are
        copies, which `Replicated` compares.

    Raises:
      ValueError: If dtypes or shapes of the parts do not match.
    """
    if split is Split.COLUMNS:
        return concatenate(parts, dim=1)
    if split is Split.ROWS:
        return concatenate(parts, dim=0)
    odd = [part.shape for part in parts if part.shape[0] % 2]
    if odd:
        raise ValueError(f"gate and up in one need even rows, but have {odd[0][0]}")
    # Each rank holds its gate rows above its up rows; all gate rows come first in the
    # merged weight.
    gates = [rows(part, 0, part.shape[0] // 2) for part in parts]
    ups = [rows(part, part.shape[0] // 2, part.shape[0]) for part in parts]
    return concatenate([*gates, *ups], dim=0)


def split_shape(
    shape: tuple[int, ...], split: Split, num_ranks: int
) -> tuple[int, ...]:
    """Returns the shape of one rank's part of a weight.

    Raises:
      ValueError: If the split dim is not divisible by the number of parts.
    """
    if split is Split.NONE:
        return shape
    dim = 1 if split is Split.COLUMNS else 0
    divisor = num_ranks * (2 if split is Split.GATED else 1)
    if shape[dim] % divisor:
        raise ValueError(
            f"dim {dim} of shape {shape} is not a multiple of {divisor}, as "
            f"{num_ranks} tensor-parallel ranks need {split.value}"
        )
    return (*shape[:dim], shape[dim] // num_ranks, *shape[dim + 1 :])


def cut(array: np.ndarray, split: Split, num_ranks: int) -> list[np.ndarray]:
    """Splits a weight into one part per rank; the inverse of `merge`."""
    if split is Split.NONE:
        return [array] * num_ranks
    if split is Split.GATED:
        gate, up = (np.split(half, num_ranks) for half in np.split(array, 2))
        return [np.concatenate(parts) for parts in zip(gate, up, strict=True)]
    return np.split(array, num_ranks, axis=1 if split is Split.COLUMNS else 0)
