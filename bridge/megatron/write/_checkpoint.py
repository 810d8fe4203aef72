"""Saving: writes a model's tensors as a checkpoint that Megatron loads."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from bridge._local_path import check_local
from bridge._new_directory import check_free
from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.formats._torch_writer import TorchWriter
from bridge.megatron._key_mapping import hybrid_pattern
from bridge.megatron._pipeline import Pipeline
from bridge.megatron._ranks import ParallelSizes
from bridge.megatron._vocab import Keyed
from bridge.megatron.read._checkpoint import COMMON_NAME
from bridge.megatron.read._optimizer import MegatronOptimizer
from bridge.megatron.write._directory import new_checkpoint
from bridge.megatron.write._flat_buffers import check_buffers
from bridge.megatron.write._fsdp_dtensor import write_fsdp_dtensor
from bridge.megatron.write._legacy import check_split, write_legacy
from bridge.megatron.write._mixer_parts import split_mixers
from bridge.megatron.write._optimizer_state import (
    FORMATS,
    OptimizerFormat,
    OptimizerState,
    optimizer_state,
)
from bridge.megatron.write._optimizer_tree import common_optimizer, step_tensor
from bridge.megatron.write._settings import common_state, with_facts
from bridge.megatron.write._target import Target
from bridge.megatron.write._torch_dist import slots_of, write_torch_dist
from bridge.streaming._load import Progress

Format = Literal["torch_dist", "legacy", "fsdp_dtensor"]


def write_megatron(
    path: str | os.PathLike[str],
    source: Source,
    args: Mapping[str, Any],
    *,
    format: Format = "torch_dist",
    optimizer: MegatronOptimizer | None = None,
    optimizer_format: OptimizerFormat | None = None,
    scheduler: Mapping[str, Any] | None = None,
    iteration: int | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    vpp: int = 1,
    max_file_bytes: int = 5 * 10**9,
    progress: Progress | None = None,
) -> None:
    """Writes a checkpoint that Megatron's `--load` reads, without Megatron or torch.

    One tensor is in memory at a time. The write is atomic: the directory is renamed to
    its final name when it is complete, and a failure leaves nothing behind. Checkpoints
    of `torch_dist` and `fsdp_dtensor` are independent of parallel sizes: any run reads
    them. None holds torch's random generators: load them with `--no-load-rng`.

    Args:
      path: Directory that does not exist yet, or is empty.
      source: Tensors of a model by canonical name, as in `MegatronCheckpoint.source`.
        Embedding and head are padded with zeros to the multiple that Megatron needs.
      args: Settings of the run that will load the checkpoint, by Megatron's names.
        `num_layers`, `num_experts` and other values that follow from the tensors are
        set automatically. Values must be plain or numpy dtypes; see `plain_args`.
      format: `"torch_dist"`, `"legacy"` (`--ckpt-format torch`), or `"fsdp_dtensor"`
        (Megatron-FSDP), which holds the master weights if the optimizer has any.
      optimizer: Adam state, as in `MegatronCheckpoint.optimizer`; None writes none.
      optimizer_format: Form of the Adam state. None takes `"plain"` if `args` say
        `use_distributed_optimizer=False`, otherwise the form of a distributed optimizer
        that `format` can hold: `"fully_reshardable"` or `"distributed"`. The latter and
        `"dp_reshardable"` are for a run of these parallel sizes and `ddp_bucket_size`.
      scheduler: State of the learning-rate schedule, as in
        `MegatronCheckpoint.scheduler`. Megatron needs it beside an optimizer.
      iteration: Number of training steps done; None writes a `release`.
      tp: Number of tensor-parallel ranks. Only for legacy files and `dp_reshardable`,
        as are the next three arguments.
      pp: Number of pipeline stages.
      ep: Number of expert-parallel ranks.
      vpp: Number of model chunks per stage (virtual pipeline).
      max_file_bytes: Size in bytes at which a file of `torch_dist` or `fsdp_dtensor` is
        closed and the next one started.
      progress: Called after each tensor with bytes written and total bytes.

    Raises:
      ValueError: If `path` exists and is not an empty directory, if `args` or
        `optimizer` contradict the tensors, or if the parallel sizes do not divide the
        model; nothing is written.
    """
    check_local(path)
    check_free(Path(path))
    sizes = ParallelSizes(tp, pp, ep)
    chosen = _optimizer_format(format, optimizer, optimizer_format, args)
    _check_sizes(format, chosen, (*sizes, vpp))
    ranked = _is_ranked(format, chosen)
    if ranked:
        _check_not_hybrid(args, chosen or format)
    multiple = (args.get("make_vocab_size_divisible_by") or 128) * tp
    args = with_facts(source, args, sizes, vpp, multiple)
    pipeline = Pipeline(sizes, vpp, args["num_layers"], args["num_experts"] or 0)
    target = Target(args, pipeline, multiple)
    if ranked:
        check_split(source, target)
    state = None
    if optimizer is not None and chosen is not None:
        state = _checked_state(source, optimizer, target, chosen, ranked=ranked)
    if format == "fsdp_dtensor" and optimizer is not None:
        source = _with_masters(source, optimizer)
    common = common_state(args, iteration, scheduler, chosen)
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    tick = _counter(_nbytes(source) + (state.nbytes() if state else 0), progress)
    slots = {}
    if format == "torch_dist":
        source, state = _by_part(source, state)
        slots = slots_of(source, args)
    with new_checkpoint(Path(path), name) as directory:
        if format == "legacy":
            write_legacy(directory, source, common, target, tick=tick, state=state)
            return
        options = {"max_file_bytes": max_file_bytes, "tick": tick, "state": state}
        if format == "fsdp_dtensor":
            write_fsdp_dtensor(directory, source, common, target, **options)
            return
        _write_common(directory, common, state)
        write_torch_dist(directory, source, slots, target, **options)


def _checked_state(
    source: Source,
    optimizer: MegatronOptimizer,
    target: Target,
    form: OptimizerFormat,
    *,
    ranked: bool,
) -> OptimizerState:
    """Returns the Adam state, whose buffers fit the target."""
    state = optimizer_state(source, optimizer, target.args, form, ranked=ranked)
    if form in ("dp_reshardable", "distributed"):
        check_buffers(source, state.kinds, target)
    return state


def _check_not_hybrid(args: Mapping[str, Any], form: str) -> None:
    if pattern := hybrid_pattern(args):
        raise ValueError(
            f"hybrid_layer_pattern={pattern!r}: {form} files are of ranks, "
            "and layers of a hybrid model are not distributed to ranks here. Write "
            "torch_dist (fully_reshardable or plain) or fsdp_dtensor."
        )


def _optimizer_format(
    format: Format,
    optimizer: MegatronOptimizer | None,
    chosen: OptimizerFormat | None,
    args: Mapping[str, Any],
) -> OptimizerFormat | None:
    if optimizer is None and chosen is None:
        return None
    if optimizer is None:
        raise ValueError(f"optimizer_format is {chosen!r}, and no optimizer is given.")
    if chosen is None:
        is_plain = args.get("use_distributed_optimizer") is False
        return FORMATS[format][-1 if is_plain else 0]
    if chosen not in FORMATS[format]:
        raise ValueError(
            f"{format} cannot hold an optimizer as {chosen!r}; give one of "
            f"{', '.join(map(repr, FORMATS[format]))}."
        )
    return chosen


def _is_ranked(format: Format, chosen: OptimizerFormat | None) -> bool:
    """Returns whether the files depend on the parallel sizes of the run."""
    return format == "legacy" or chosen == "dp_reshardable"


def _check_sizes(
    format: Format, chosen: OptimizerFormat | None, sizes: tuple[int, ...]
) -> None:
    if not _is_ranked(format, chosen) and set(sizes) != {1}:
        tp, pp, ep, vpp = sizes
        raise ValueError(
            f"{format} fits any run: leave out TP {tp}, PP {pp}, EP {ep}, VPP {vpp}."
        )


def _with_masters(source: Source, optimizer: MegatronOptimizer) -> Source:
    """Returns the weights that the optimizer updates, and what it does not."""
    if optimizer.master is None:
        return source
    masters = set(optimizer.master.keys())
    tensors = {
        key: Keyed(optimizer.master if key in masters else source, key)
        for key in source.keys()
    }
    return TensorSource(source.name, MappingProxyType(tensors))


def _by_part(
    source: Source, state: OptimizerState | None
) -> tuple[Source, OptimizerState | None]:
    """Returns weights and state with an entry for each part of a mixer."""
    if state is not None:
        kinds = {kind: split_mixers(of) for kind, of in state.kinds.items()}
        state = dataclasses.replace(state, kinds=kinds)
    return split_mixers(source), state


def _write_common(
    directory: Path, common: Mapping[str, Any], state: OptimizerState | None
) -> None:
    with (directory / COMMON_NAME).open("wb") as file, TorchWriter(file) as writer:
        optimizer = {}
        if state is not None:
            step = writer.add(step_tensor(state))
            optimizer = {"optimizer": common_optimizer(state, step)}
        writer.finish({**common, **optimizer})


def _nbytes(source: Source) -> int:
    return sum(
        math.prod(source.shape(key)) * source.dtype(key).itemsize
        for key in source.keys()
    )


def _counter(total: int, progress: Progress | None) -> Callable[[int], None]:
    done = 0

    def tick(nbytes: int) -> None:
        nonlocal done
        done = min(done + nbytes, total)  # padding and copies are not counted
        if progress is not None:
            progress(done, total)

    return tick
