"""Saving a decoder's weights for Megatron."""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

from bridge._local_path import check_local
from bridge.formats._source import Source
from bridge.megatron._decoder import megatron_tensors
from bridge.megatron.config._args import to_args
from bridge.megatron.config._transformer_config import to_transformer_config
from bridge.megatron.write._checkpoint import Format, write_megatron
from bridge.models import DecoderConfig
from bridge.streaming._load import Progress


def save_megatron(
    path: str | os.PathLike[str],
    params: Any,
    config: DecoderConfig,
    *,
    format: Format = "torch_dist",
    iteration: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    virtual_pipeline: int | None = None,
    expert_parallel: int = 1,
    make_vocab_size_divisible_by: int = 128,
    flags: Mapping[str, Any] | None = None,
    max_file_bytes: int = 5 * 10**9,
    progress: Progress | None = None,
) -> None:
    """Writes a checkpoint that Megatron's `--load` reads, without Megatron or torch.

    One tensor is gathered to the host at a time. The write is atomic: the directory is
    renamed to its final name when it is complete, and a failure leaves nothing behind.

    Args:
      path: Directory that does not exist yet, or is empty.
      params: Pytree of arrays with any sharding, fully addressable by this process.
      config: Model config, written as the settings of a run.
      format: `"torch_dist"` and `"fsdp_dtensor"` (Megatron-FSDP), readable by any run,
        or `"legacy"` (`--ckpt-format torch`), readable only by a run with the same
        parallel sizes.
      iteration: Number of training steps done; None writes a `release`.
      tensor_parallel: Number of tensor-parallel ranks, for experts too. Legacy only,
        as are the next three arguments.
      pipeline_parallel: Number of pipeline stages.
      virtual_pipeline: Number of model chunks per stage; None means one.
      expert_parallel: Number of expert-parallel ranks.
      make_vocab_size_divisible_by: Padding of the vocabulary: rows of zeros extend it
        to a multiple of this times `tensor_parallel`.
      flags: Further settings of the run, such as `{"transformer_impl": "local"}`.
      max_file_bytes: Size in bytes at which a file that is not legacy is closed and the
        next one started.
      progress: Called after each tensor with bytes written and total bytes.

    Raises:
      ValueError: If `path` exists and is not empty, if `params` and `config` do not
        match, if Megatron's layers cannot be this model's, or if the parallel sizes do
        not divide it; nothing is written.

    Examples:
      >>> bridge.save_megatron(path, params, config, format="legacy", tensor_parallel=2)
      >>> loaded = bridge.load_megatron(path, like)
      >>> jax.tree.all(jax.tree.map(jnp.array_equal, loaded, params))
      True
    """
    check_local(path)
    source = megatron_tensors(params, config)
    write_decoder(
        path,
        source,
        config,
        sizes={
            "tensor_parallel": tensor_parallel,
            "pipeline_parallel": pipeline_parallel,
            "virtual_pipeline": virtual_pipeline,
            "expert_parallel": expert_parallel,
        },
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        flags=flags,
        format=format,
        iteration=iteration,
        max_file_bytes=max_file_bytes,
        progress=progress,
    )


def write_decoder(
    path: str | os.PathLike[str],
    source: Source,
    config: DecoderConfig,
    *,
    sizes: Mapping[str, Any],
    make_vocab_size_divisible_by: int,
    flags: Mapping[str, Any] | None,
    **options: Any,
) -> None:
    """Writes a decoder's tensors with the settings that its config determines.

    Args:
      path: Directory that does not exist yet, or is empty.
      source: Tensors by canonical name, in the dtypes of the run.
      config: Model config.
      sizes: Parallel sizes, as `to_transformer_config` takes them.
      make_vocab_size_divisible_by: Padding of the vocabulary.
      flags: Further settings of the run.
      **options: Other options of `write_megatron`.

    Raises:
      ValueError: For the reasons given in `save_megatron`.
    """
    to_transformer_config(config, **sizes)  # raises if the sizes do not divide it
    args = to_args(
        dataclasses.replace(config, dtype=_main_dtype(source)),
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        flags=flags,
    )
    write_megatron(
        path,
        source,
        args,
        tp=sizes["tensor_parallel"] or 1,
        pp=sizes["pipeline_parallel"] or 1,
        ep=sizes["expert_parallel"] or 1,
        vpp=sizes["virtual_pipeline"] or 1,
        **options,
    )


def _main_dtype(source: Source) -> str:
    """Returns the dtype of most elements; a run stores all parameters in one dtype."""
    sizes = Counter[str]()
    for key in source.keys():
        sizes[source.dtype(key).name] += math.prod(source.shape(key))
    return sizes.most_common(1)[0][0]
