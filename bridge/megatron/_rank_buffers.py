"""Buffers of each model-parallel rank: the parameters that one optimizer flattens.

A rank holds one buffer per model chunk for its dense weights, and, with expert
parallelism, another for its experts. Files name a buffer by the optimizer, the rank and
the chunk, and record no parameter names.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from bridge.megatron._key_mapping import in_module
from bridge.megatron._names import EMBEDDING, HEAD
from bridge.megatron._pipeline import Pipeline
from bridge.megatron._ranks import ParallelSizes, Rank
from bridge.megatron._tensor_parallel import Split, is_gated, split_of, split_shape
from bridge.megatron.buffers._param_order import is_parameter, order_in_module

_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "num_layers_per_virtual_pipeline_stage",
    "mtp_num_layers",
)


class RankBuffer(NamedTuple):
    """Buffer of one model-parallel rank.

    Args:
      rank: Model-parallel rank. Dense weights are the same on all of its
        expert-parallel ranks; its `ep` is then 0.
      is_expert: Whether the buffer holds experts.
      group: Number of the data-parallel group, as files name it.
      chunk: Number of the model chunk of a virtual pipeline.
      names: Canonical names of the parameters, in registration order.
      shared: Canonical name of the embedding if the first and the last stage share it,
        and it is in this buffer; None otherwise.
    """

    rank: Rank
    is_expert: bool
    group: int
    chunk: int
    names: tuple[str, ...]
    shared: str | None


def even_pipeline(args: Mapping[str, Any]) -> Pipeline:
    """Returns the distribution of layers and experts that a run's settings describe.

    Raises:
      ValueError: If layers are distributed unevenly, experts are split over other
        tensor-parallel ranks than the rest, or the number of layers is unknown.
    """
    uneven = [name for name in _UNEVEN if args.get(name)]
    names = ("tensor", "pipeline", "expert")
    sizes = ParallelSizes(*(args.get(f"{n}_model_parallel_size") or 1 for n in names))
    if args.get("num_experts") and sizes.tp != (
        args.get("expert_tensor_parallel_size") or sizes.tp
    ):
        uneven.append("expert_tensor_parallel_size")
    num_chunks = args.get("virtual_pipeline_model_parallel_size") or 1
    num_layers = args.get("num_layers") or 0
    if uneven or not num_layers or num_layers % (sizes.pp * num_chunks):
        raise ValueError(f"its pipeline is not even, or not known ({uneven})")
    return Pipeline(sizes, num_chunks, num_layers, args.get("num_experts") or 0)


def rank_buffers(
    model: Collection[str], args: Mapping[str, Any], pipeline: Pipeline
) -> Iterator[RankBuffer]:
    """Yields the buffers of all model-parallel ranks.

    Args:
      model: Canonical names of the model's tensors.
      args: Settings of the run.
      pipeline: Distribution of layers and experts over ranks.

    Raises:
      ValueError: If the registration order of a parameter is unknown.
    """
    sizes, names = pipeline.sizes, frozenset(model)
    placed: dict[tuple[int, int, int | None], list[tuple[Any, str]]] = {}
    entries = [(name, name) for name in model if is_parameter(name)]
    tied = HEAD not in names and sizes.pp > 1
    if tied:  # a copy in the last stage
        entries.append((HEAD, EMBEDDING))
    for local, name in entries:
        stage, chunk, local = pipeline.place(local)
        expert_rank, local = pipeline.expert(local)
        if sizes.ep == 1:  # experts are in the optimizer of the dense weights
            expert_rank = None
        order = order_in_module(in_module(local, names, args))
        placed.setdefault((stage, chunk, expert_rank), []).append((order, name))
    for (stage, chunk, expert_rank), found in placed.items():
        ordered = tuple(name for _, name in sorted(found))
        shared = EMBEDDING if tied and EMBEDDING in ordered else None
        is_expert, ep = expert_rank is not None, expert_rank or 0
        for tp in range(sizes.tp):
            # Groups are numbered with tp innermost and the pipeline outermost.
            group = (stage * sizes.ep + ep if is_expert else stage) * sizes.tp + tp
            rank = Rank(tp, stage, ep)
            yield RankBuffer(rank, is_expert, group, chunk, ordered, shared)


def split_in(name: str, args: Mapping[str, Any], pipeline: Pipeline) -> Split:
    """Returns the split of a weight over the tensor-parallel ranks of a run."""
    if pipeline.sizes.tp == 1:
        return Split.NONE
    return split_of(name, gated=is_gated(args))


def local_shape(
    name: str, shape: tuple[int, ...], args: Mapping[str, Any], pipeline: Pipeline
) -> tuple[int, ...]:
    """Returns the shape of one tensor-parallel rank's part of a weight."""
    return split_shape(shape, split_in(name, args, pipeline), pipeline.sizes.tp)
