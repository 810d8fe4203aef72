"""Flat buffers of a distributed optimizer, read parameter by parameter."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from bridge._box import Range
from bridge.formats._source import Source
from bridge.formats._torch_dtypes import DTYPE_NAMES
from bridge.megatron._rank_buffers import RankBuffer, rank_buffers, split_in
from bridge.megatron._rank_layout import rank_layout
from bridge.megatron._tensor_parallel import cut
from bridge.megatron._vocab import pad_vocab, padded_shape
from bridge.megatron.buffers._buffer_layout import BufferLayout
from bridge.megatron.buffers._param_order import is_parameter
from bridge.megatron.write._target import Target

KINDS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Kinds of state by the name that flat buffers use."""


class FlatBuffer(NamedTuple):
    """Buffer of one model-parallel rank, with its layout.

    Args:
      of: Rank, chunk and parameters of the buffer.
      layout: Positions of the parameters.
    """

    of: RankBuffer
    layout: BufferLayout


def flat_buffers(source: Source, target: Target) -> list[FlatBuffer]:
    """Returns the buffers of all ranks.

    Args:
      source: Tensors of the model by canonical name, or one kind of its state.
      target: Run that the checkpoint is written for.

    Raises:
      ValueError: If the order of a parameter is unknown, or sizes do not divide.
    """
    shapes = {
        key: padded_shape(key, source.shape(key), target.multiple)
        for key in source.keys()
    }
    args, pipeline = target.args, target.pipeline
    return [
        FlatBuffer(buffer, rank_layout(buffer, shapes, args, pipeline))
        for buffer in rank_buffers(shapes, args, pipeline)
    ]


def bucket_values(
    buffer: FlatBuffer, bucket: int, source: Source, target: Target
) -> Iterator[tuple[Range, np.ndarray]]:
    """Yields the values of a bucket in order, with zeros between parameters.

    Yields:
      Pairs of a range relative to the bucket's start and the values that fill it.
    """
    layout, stop, dtype = buffer.layout, 0, None
    places = [place for place in layout.placements if place.bucket == bucket]
    for place in places:
        name = place.param.name
        array = pad_vocab(name, source.read(name), target.multiple)
        split = split_in(name, target.args, target.pipeline)
        local = cut(array, split, target.pipeline.sizes.tp)[buffer.of.rank.tp]
        start = layout.in_bucket(name).start
        if start > stop:
            yield Range(stop, start), np.zeros(start - stop, array.dtype)
        stop, dtype = start + local.size, array.dtype
        yield Range(start, stop), local.reshape(-1)
    end = layout.buckets[bucket].num_unpadded
    if end > stop:
        yield Range(stop, end), np.zeros(end - stop, dtype)


def check_buffers(source: Source, kinds: Mapping[str, Source], target: Target) -> None:
    """Checks that optimizer state can be written as flat buffers.

    Args:
      source: Tensors of the model by canonical name.
      kinds: State of the optimizer by kind.
      target: Run that the checkpoint is written for.

    Raises:
      ValueError: If parameters have several dtypes, state is not float32, the order of
        a parameter is unknown, or sizes do not divide.
    """
    buffer_dtypes(source, target.args)
    narrow = [
        f"  {kind} of {key}: {tensors.dtype(key)}"
        for kind, tensors in kinds.items()
        for key in tensors.keys()
        if tensors.dtype(key) != np.float32
    ]
    if narrow:
        raise ValueError(
            "Flat buffers hold state in float32. Write the optimizer as "
            "fully_reshardable or plain, for these are not:\n" + "\n".join(narrow)
        )
    flat_buffers(source, target)


def buffer_dtypes(source: Source, args: Mapping[str, Any]) -> tuple[str, str]:
    """Returns torch's names of the dtypes of a buffer's parameters and gradients.

    Raises:
      ValueError: If the parameters have several dtypes: each then has a buffer, and
        files number them in an order that depends on the run.
    """
    dtypes = {source.dtype(key) for key in source.keys() if is_parameter(key)}
    if len(dtypes) > 1:
        shown = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"Flat buffers hold parameters of one dtype, and '{source.name}' has "
            f"{shown}. Write the optimizer as fully_reshardable or plain."
        )
    (param,) = (DTYPE_NAMES[dtype] for dtype in dtypes)
    in_float32 = args.get("accumulate_allreduce_grads_in_fp32")
    if in_float32 is None:
        in_float32 = not args.get("grad_reduce_in_bf16")
    return param, "float32" if in_float32 else param
