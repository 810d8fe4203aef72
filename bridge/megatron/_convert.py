"""Conversion between Megatron's formats, without a model, a GPU or torch."""

import os
from typing import Any

import numpy as np

from bridge._local_path import check_local
from bridge.formats._source import Source
from bridge.megatron._cast import Cast
from bridge.megatron.buffers._param_order import is_parameter
from bridge.megatron.read._checkpoint import MegatronCheckpoint, open_megatron
from bridge.megatron.read._optimizer import MegatronOptimizer
from bridge.megatron.write._checkpoint import Format, write_megatron
from bridge.megatron.write._optimizer_state import OptimizerFormat
from bridge.megatron.write._settings import plain_args
from bridge.streaming._load import Progress


def convert_megatron(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: Format,
    optimizer: bool = True,
    optimizer_format: OptimizerFormat | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    vpp: int = 1,
    max_file_bytes: int = 5 * 10**9,
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Writes a Megatron checkpoint in another of Megatron's formats.

    One tensor is in memory at a time, and no model is built: checkpoints of families
    that `bridge` does not know are converted too. Values are copied bit by bit. Only
    weights in a narrow dtype are rounded anew, from master weights, where the source
    holds those alone (`fsdp_dtensor`).

    Args:
      src: Checkpoint of any format, as `open_megatron` takes it.
      dst: Directory that does not exist yet, or is empty.
      format: Format to write, as `write_megatron` takes it.
      optimizer: Whether to write the Adam state too.
      optimizer_format: Form of the Adam state, as `write_megatron` takes it.
      tp: Number of tensor-parallel ranks. Only for legacy files and
        `"dp_reshardable"`, as are the next three arguments.
      pp: Number of pipeline stages.
      ep: Number of expert-parallel ranks.
      vpp: Number of model chunks per stage.
      max_file_bytes: Size in bytes at which a file that is not legacy is closed and the
        next one started.
      progress: Called after each tensor with bytes written and total bytes.

    Returns:
      What is not converted, one line each.

    Raises:
      FileNotFoundError: If there is no checkpoint.
      ValueError: If the checkpoint is damaged, if it holds no Adam state that can be
        converted and `optimizer` is True, or for the reasons given in
        `write_megatron`.
    """
    check_local(src, dst)
    run = open_megatron(src)
    state = _optimizer_of(run) if optimizer else None
    source, state = _as_in_the_run(run, state)
    args, objects = plain_args(run.args)
    write_megatron(
        dst,
        source,
        args,
        format=format,
        optimizer=state,
        optimizer_format=optimizer_format,
        scheduler=run.scheduler,
        iteration=run.iteration,
        tp=tp,
        pp=pp,
        ep=ep,
        vpp=vpp,
        max_file_bytes=max_file_bytes,
        progress=progress,
    )
    settings = (f"settings that are objects: {', '.join(objects)}",) if objects else ()
    return (*run.left_out, *settings)


def _optimizer_of(run: MegatronCheckpoint) -> MegatronOptimizer:
    if run.optimizer is None:
        lines = "\n".join(f"  {line}" for line in run.left_out)
        raise ValueError(
            f"'{run.path}' holds no Adam state that can be converted; take the weights "
            f"alone (optimizer=False). Left out are:\n{lines or '  nothing'}"
        )
    return run.optimizer


def _as_in_the_run(
    run: MegatronCheckpoint, state: MegatronOptimizer | None
) -> tuple[Source, MegatronOptimizer | None]:
    """Returns weights in the run's dtype, and state with the master weights."""
    dtype, source = run.args.get("params_dtype"), run.source
    widths = {source.dtype(key) for key in source.keys() if is_parameter(key)}
    is_master = widths == {np.dtype(np.float32)} and _is_narrow(dtype)
    if not is_master or run.format != "dcp":
        return source, state
    if state is not None and state.master is None:
        state = MegatronOptimizer(
            state.exp_avg, state.exp_avg_sq, source, state.step, state.param_groups
        )
    return Cast(source, np.dtype(dtype)), state


def _is_narrow(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.itemsize < 4
