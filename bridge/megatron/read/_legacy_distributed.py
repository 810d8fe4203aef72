"""State of a distributed optimizer in legacy files, split into weights.

`distrib_optim.pt` beside each rank's `model_optim_rng.pt` holds the rank's buffers,
gathered over its data-parallel ranks, without the padding at the ends of buckets and
without parameter names. The positions follow from the run's settings. The recorded
length checks them, and so does every read: the master weights round to the weights.

Source: Megatron-LM megatron/core/optimizer/distrib_optimizer.py
::DistributedOptimizer.get_parameter_state_dp_zero
"""

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.formats._torch_tensors import LazyTensor
from bridge.formats._torch_zip import read_torch_file
from bridge.megatron._rank_buffers import RankBuffer, even_pipeline, rank_buffers
from bridge.megatron._rank_layout import rank_layout
from bridge.megatron._views import Tensor, Unflattened
from bridge.megatron.buffers._buffer_layout import BufferLayout
from bridge.megatron.read._buffer_parts import KINDS, Parts, merge_parts
from bridge.megatron.read._legacy import LegacyDirectory
from bridge.megatron.read._verified import verify_states

DISTRIBUTED_NAME = "distrib_optim.pt"


def read_distributed(legacy: LegacyDirectory) -> dict[str, dict[str, Tensor]]:
    """Returns each weight's master weight and moments.

    Args:
      legacy: Legacy checkpoint whose optimizer is distributed.

    Returns:
      Tensors by canonical name for each of `"master"`, `"exp_avg"`, `"exp_avg_sq"`.
      Each read verifies that the state belongs to its weight.

    Raises:
      FileNotFoundError: If a rank's file is absent.
      ValueError: If a buffer's length is not what the run's settings give.
    """
    args = legacy.common["args"]
    pipeline = even_pipeline(args)
    shapes = {name: tensor.shape for name, tensor in legacy.tensors.items()}
    trees = {
        rank: read_torch_file(
            legacy.path / legacy.sizes.directory(rank) / DISTRIBUTED_NAME
        )
        for rank in legacy.sizes.ranks()
    }
    parts: Parts = {}
    for buffer in rank_buffers(legacy.tensors, args, pipeline):
        layout = rank_layout(buffer, shapes, args, pipeline)
        flat = _flat(trees[buffer.rank], buffer, layout)
        for name, found in _take_apart(flat, layout):
            parts.setdefault(name, {})[buffer.group, buffer.rank.tp] = found
    return verify_states(merge_parts(parts, args, pipeline), legacy.tensors)


def _flat(tree: Any, buffer: RankBuffer, layout: BufferLayout) -> dict[str, LazyTensor]:
    """Returns a buffer's flat tensors by kind."""
    tree = tree[int(buffer.is_expert)] if isinstance(tree, list) else tree
    if not tree.get("buckets_coalesced"):
        raise ValueError("it was saved before February 2024, in other buckets")
    (state,) = tree[buffer.chunk].values()
    lengths = {kind: state[kind].shape for kind in KINDS}
    expected = (layout.num_unpadded,)
    if set(lengths.values()) != {expected}:
        raise ValueError(
            f"buffer {buffer.chunk} of rank {tuple(buffer.rank)} has {lengths} "
            f"elements, {expected} by the run's settings (ddp_bucket_size, "
            "data_parallel_size)"
        )
    return {kind: state[kind] for kind in KINDS}


def _take_apart(
    flat: Mapping[str, LazyTensor], layout: BufferLayout
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    starts, total = [], 0
    for bucket in layout.buckets:
        starts.append(total)
        total += bucket.num_unpadded
    for place in layout.placements:
        start = starts[place.bucket] + layout.in_bucket(place.param.name).start
        yield (
            place.param.name,
            {
                kind: Unflattened(tensor, start, place.param.shape)
                for kind, tensor in flat.items()
            },
        )
