"""Legacy checkpoint writer: splits each tensor over its ranks as it is read."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge._report import format_report
from bridge.formats._source import Source
from bridge.formats._torch_writer import TorchWriter
from bridge.megatron._pipeline import Pipeline
from bridge.megatron._rank_buffers import local_shape
from bridge.megatron._ranks import Rank
from bridge.megatron._vocab import padded_shape
from bridge.megatron.read._legacy import FILE_NAME
from bridge.megatron.write._legacy_distributed import write_distributed
from bridge.megatron.write._legacy_optimizer import (
    OfRank,
    RankTensors,
    distributed_settings,
    legacy_optimizer,
    names_in_order,
)
from bridge.megatron.write._optimizer_state import OptimizerState
from bridge.megatron.write._optimizer_tree import step_tensor
from bridge.megatron.write._rank_parts import rank_parts
from bridge.megatron.write._target import Target


def check_split(source: Source, target: Target) -> None:
    """Checks that a model can be split over the ranks, before anything is written.

    Args:
      source: Tensors of the model by canonical name.
      target: Run that the checkpoint is written for.

    Raises:
      ValueError: If layers, experts or dims are not divisible, or the legacy name of a
        tensor is unknown (`mtp`); all errors are listed.
    """
    pipeline, wrong = target.pipeline, []
    stages = pipeline.sizes.pp * pipeline.num_chunks
    if pipeline.num_layers % stages:
        wrong.append(f"{pipeline.num_layers} layers among PP x VPP = {stages} chunks")
    ep = pipeline.sizes.ep
    if pipeline.num_experts % ep or (ep > 1 and not pipeline.num_experts):
        wrong.append(f"{pipeline.num_experts} experts among EP = {ep} ranks")
    wrong += [
        f"{name}: what its module is called depends on the version; use torch_dist"
        for name in source.keys()
        if name.startswith("mtp.")
    ]
    for name in source.keys():
        try:
            shape = padded_shape(name, source.shape(name), target.multiple)
            local_shape(name, shape, target.args, pipeline)
        except ValueError as error:
            wrong.append(f"{name}: {error}")
    if wrong:
        report = format_report({"in the way": wrong})
        raise ValueError(f"'{source.name}' cannot be split so:\n{report}")


def write_legacy(
    directory: Path,
    source: Source,
    common: Mapping[str, Any],
    target: Target,
    *,
    tick: Callable[[int], None],
    state: OptimizerState | None = None,
) -> None:
    """Writes one file per model-parallel rank, with one tensor in memory at a time.

    All files are open at once, because a tensor may go to several of them.

    Args:
      directory: Existing, empty directory.
      source: Tensors of the model by canonical name.
      common: State that each file holds beside the model.
      target: Run that the checkpoint is written for.
      tick: Called after each tensor with its size in bytes.
      state: Adam state, `"plain"` or `"distributed"`; None writes none.
    """
    order = source.keys() if state is None else names_in_order(source, target)
    with contextlib.ExitStack() as stack:
        files = _open(directory, target.pipeline, stack)
        model = _write(source, order, files, target, tick)
        optimizers: dict[Rank, dict[str, Any]] = {rank: {} for rank in files}
        if state is not None and state.format == "plain":
            tensors = {
                kind: _write(of, order, files, target, tick)
                for kind, of in state.kinds.items()
            }
            for rank, writer in files.items():
                of_rank = {kind: found[rank] for kind, found in tensors.items()}
                tree = legacy_optimizer(
                    *(state, model[rank], of_rank, target.args),
                    lambda writer=writer: writer.add(step_tensor(state)),
                )
                optimizers[rank] = {"optimizer": tree}
        elif state is not None:
            write_distributed(directory, source, state, target, tick)
            settings = {"optimizer": distributed_settings(state)}
            optimizers = dict.fromkeys(files, settings)
        for rank, writer in files.items():
            chunks = _chunks(model[rank], target.pipeline.num_chunks)
            writer.finish({**common, **chunks, **optimizers[rank]})


def _write(
    source: Source,
    order: Sequence[str],
    files: Mapping[Rank, TorchWriter],
    target: Target,
    tick: Callable[[int], None],
) -> RankTensors:
    """Writes the model, or one kind of its state, into the ranks' files."""
    names, present = frozenset(order), set(source.keys())
    found: RankTensors = {rank: {} for rank in files}
    for name in order:
        if name in present:
            for part in rank_parts(name, source, names, target):
                tensor = part.array.shape, files[part.rank].add(part.array)
                found[part.rank][part.chunk, part.name] = tensor
            tick(math.prod(source.shape(name)) * source.dtype(name).itemsize)
    return found


def _open(
    directory: Path, pipeline: Pipeline, stack: contextlib.ExitStack
) -> dict[Rank, TorchWriter]:
    files = {}
    for rank in pipeline.sizes.ranks():
        file = directory / pipeline.sizes.directory(rank) / FILE_NAME
        file.parent.mkdir()
        stream = stack.enter_context(file.open("wb"))
        files[rank] = stack.enter_context(TorchWriter(stream))
    return files


def _chunks(tensors: OfRank, num_chunks: int) -> dict[str, dict[str, Any]]:
    """Returns a rank's model chunks by the names that its file has for them."""
    names = ["model"] if num_chunks == 1 else [f"model{n}" for n in range(num_chunks)]
    chunks: dict[str, dict[str, Any]] = {name: {} for name in names}
    for (chunk, name), (_, tensor) in tensors.items():
        chunks[names[chunk]][name] = tensor
    return chunks
