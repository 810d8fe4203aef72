"""Parts of a tensor that model-parallel ranks hold, cut as the tensor is read."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bridge.formats._source import Source
from bridge.megatron._key_mapping import in_module
from bridge.megatron._names import EMBEDDING, HEAD
from bridge.megatron._pipeline import Pipeline
from bridge.megatron._rank_buffers import split_in
from bridge.megatron._ranks import Rank
from bridge.megatron._tensor_parallel import cut
from bridge.megatron._vocab import pad_vocab
from bridge.megatron.write._target import Target


class RankPart(NamedTuple):
    """Part of a tensor on one model-parallel rank.

    Args:
      rank: Rank that holds the part.
      chunk: Number of the model chunk on that rank.
      name: Name of the parameter in the chunk's module.
      array: Values of the part.
    """

    rank: Rank
    chunk: int
    name: str
    array: np.ndarray


def rank_parts(
    name: str,
    source: Source,
    names: frozenset[str],
    target: Target,
) -> Iterator[RankPart]:
    """Reads a tensor, and yields the part of each rank that holds one.

    Args:
      name: Canonical name of the tensor.
      source: Source that holds the tensor.
      names: Canonical names of all tensors of the model.
      target: Run that the checkpoint is written for.
    """
    args, pipeline = target.args, target.pipeline
    array = pad_vocab(name, source.read(name), target.multiple)
    parts = cut(array, split_in(name, args, pipeline), pipeline.sizes.tp)
    for rank, chunk, key in _copies(name, names, pipeline):
        yield RankPart(rank, chunk, in_module(key, names, args), parts[rank.tp])


def _copies(
    name: str, names: frozenset[str], pipeline: Pipeline
) -> Iterator[tuple[Rank, int, str]]:
    """Yields each rank that stores a tensor, with its chunk and local name there."""
    places = [pipeline.place(name)]
    if name == EMBEDDING and HEAD not in names and pipeline.sizes.pp > 1:
        places.append(pipeline.place(HEAD))  # tied: the last stage keeps a copy
    for stage, chunk, local in places:
        expert_rank, key = pipeline.expert(local)
        for rank in pipeline.sizes.ranks():
            if rank.pp == stage and expert_rank in (None, rank.ep):
                yield rank, chunk, key
