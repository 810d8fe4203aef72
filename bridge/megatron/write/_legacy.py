"""Legacy checkpoint writer: splits each tensor over its ranks as it is read."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge._report import format_report
from bridge.formats._source import Source
from bridge.formats._torch_writer import TorchWriter
from bridge.megatron._key_mapping import in_module
from bridge.megatron._names import EMBEDDING, HEAD
from bridge.megatron._pipeline import Pipeline
from bridge.megatron._ranks import Rank
from bridge.megatron._tensor_parallel import Split, cut, is_gated, split_of, split_shape
from bridge.megatron._vocab import pad_vocab, padded_shape
from bridge.megatron.read._legacy import FILE_NAME


def check_pipeline(
    source: Source, pipeline: Pipeline, args: Mapping[str, Any], multiple: int
) -> None:
    """Checks that a model can be split over the ranks, before anything is written.

    Args:
      source: Tensors of the model by canonical name.
      pipeline: Distribution of layers and experts over ranks.
      args: Settings of the run.
      multiple: Divisor of the padded number of vocabulary rows.

    Raises:
      ValueError: If layers, experts or dims are not divisible, or the legacy name of a
        tensor is unknown (`mtp`); all errors are listed.
    """
    sizes, wrong = pipeline.sizes, []
    stages = sizes.pp * pipeline.num_chunks
    if pipeline.num_layers % stages:
        wrong.append(f"{pipeline.num_layers} layers among PP x VPP = {stages} chunks")
    if pipeline.num_experts % sizes.ep or (sizes.ep > 1 and not pipeline.num_experts):
        wrong.append(f"{pipeline.num_experts} experts among EP = {sizes.ep} ranks")
    wrong += [
        f"{name}: what its module is called depends on the version; use torch_dist"
        for name in source.keys()
        if name.startswith("mtp.")
    ]
    for name in source.keys() if sizes.tp > 1 else ():
        try:
            shape = padded_shape(name, source.shape(name), multiple)
            split_shape(shape, split_of(name, gated=is_gated(args)), sizes.tp)
        except ValueError as error:
            wrong.append(f"{name}: {error}")
    if wrong:
        report = format_report({"in the way": wrong})
        raise ValueError(f"'{source.name}' cannot be dealt out so:\n{report}")


def write_legacy(
    directory: Path,
    source: Source,
    common: Mapping[str, Any],
    args: Mapping[str, Any],
    pipeline: Pipeline,
    *,
    multiple: int,
    tick: Callable[[int], None],
) -> None:
    """Writes one file per model-parallel rank, with one tensor in memory at a time.

    All files are open at once, because a tensor may go to several of them.

    Args:
      directory: Existing, empty directory.
      source: Tensors of the model by canonical name.
      common: State that each file holds beside the model.
      args: Settings of the run.
      pipeline: Distribution of layers and experts over ranks.
      multiple: Divisor of the padded number of vocabulary rows.
      tick: Called after each tensor with its size in bytes.
    """
    names = frozenset(source.keys())
    with contextlib.ExitStack() as stack:
        files = _open(directory, pipeline, stack)
        for name in source.keys():
            array = pad_vocab(name, source.read(name), multiple)
            tp = pipeline.sizes.tp
            split = split_of(name, gated=is_gated(args)) if tp > 1 else Split.NONE
            parts = cut(array, split, tp)
            for rank, chunk, key in _copies(name, names, pipeline):
                spelled = in_module(key, names, args)
                writer, chunks = files[rank]
                chunks[chunk][spelled] = writer.add(parts[rank.tp])
            tick(array.nbytes)
        for writer, chunks in files.values():
            keys = (
                ["model"]
                if len(chunks) == 1
                else [f"model{n}" for n in range(len(chunks))]
            )
            writer.finish({**common, **dict(zip(keys, chunks, strict=True))})


def _open(
    directory: Path, pipeline: Pipeline, stack: contextlib.ExitStack
) -> dict[Rank, tuple[TorchWriter, list[dict[str, Any]]]]:
    files = {}
    for rank in pipeline.sizes.ranks():
        file = directory / pipeline.sizes.directory(rank) / FILE_NAME
        file.parent.mkdir()
        stream = stack.enter_context(file.open("wb"))
        writer = stack.enter_context(TorchWriter(stream))
        files[rank] = writer, [{} for _ in range(pipeline.num_chunks)]
    return files


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
