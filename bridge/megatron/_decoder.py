"""A decoder's weights, to and from Megatron's checkpoints."""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax
import numpy as np

from bridge._box import as_index, complete
from bridge._local_path import check_local
from bridge._tree import arrays_of, named_leaves
from bridge.formats._source import Source
from bridge.formats._torch_zip import TensorSource
from bridge.hf._import_plan import ImportPlan, plan_of
from bridge.megatron._vocab import trim_vocab
from bridge.megatron._weight_rules import grouped_shapes, weight_mapping
from bridge.megatron.config._args import from_args, to_args
from bridge.megatron.config._transformer_config import to_transformer_config
from bridge.megatron.read._checkpoint import open_megatron
from bridge.megatron.read._regrouped import Regrouped
from bridge.megatron.write._checkpoint import write_megatron
from bridge.models import DecoderConfig
from bridge.rules._piece import Piece
from bridge.streaming._export import assemble
from bridge.streaming._files import entries_of
from bridge.streaming._lazy import LazyLeaf, lazy_tree
from bridge.streaming._load import Progress, load
from bridge.streaming._workers import workers

# Groups, parts of a group, and dims of a head are the rows of `linear_qkv`.
_NUM_FACTORS = 3


def load_megatron(
    path: str | os.PathLike[str],
    mould: Any,
    *,
    config: DecoderConfig | None = None,
    progress: Progress | None = None,
) -> Any:
    """Fills a mould with the weights of a Megatron checkpoint of any format.

    Needs neither Megatron nor torch. As `bridge.load_hf`: only what this process's
    shards need is read, and all is checked before the first weight is.

    Args:
      path: What `open_megatron` takes.
      mould: Any pytree of `jax.ShapeDtypeStruct`. A leaf is born in its `.sharding`;
        without one, on the default device.
      config: The model; None reads the settings of the run, as `from_args`.
      progress: Called with bytes of the checkpoint done, and bytes in all, after each
        tensor of the checkpoint.

    Returns:
      The mould's tree, with arrays for leaves.

    Raises:
      FileNotFoundError: If there is no checkpoint.
      ValueError: If the checkpoint is damaged, its model cannot be carried over, or
        mould, config and checkpoint do not fit; everything that does not is listed.
    """
    source, config = open_decoder(path, config)
    return load(source, weight_mapping(config), mould, progress=progress)


def plan_megatron(
    path: str | os.PathLike[str],
    mould: Any = None,
    *,
    config: DecoderConfig | None = None,
) -> ImportPlan:
    """Says what `load_megatron` would do, without reading a weight.

    Args:
      path: What `open_megatron` takes.
      mould: As for `load_megatron`; None takes every leaf whole and in the dtype of
        its tensors.
      config: As for `load_megatron`.

    Raises:
      FileNotFoundError: If there is no checkpoint.
      ValueError: As for `load_megatron`.
    """
    source, config = open_decoder(path, config)
    return plan_of(source, weight_mapping(config), config, mould)


def lazy_megatron(
    path: str | os.PathLike[str], config: DecoderConfig | None = None
) -> tuple[dict[str, LazyLeaf], DecoderConfig]:
    """Opens a checkpoint as a tree of which nothing is read yet, to be saved elsewhere.

    Args:
      path: What `open_megatron` takes.
      config: As for `load_megatron`.

    Returns:
      Leaves by dotted path, and the model.

    Raises:
      FileNotFoundError: If there is no checkpoint.
      ValueError: As for `load_megatron`.
    """
    source, config = open_decoder(path, config)
    return lazy_tree(source, weight_mapping(config)), config


def open_decoder(
    path: str | os.PathLike[str], config: DecoderConfig | None = None
) -> tuple[Source, DecoderConfig]:
    """Opens a checkpoint as the rules see it, and finds what model it holds.

    Args:
      path: What `open_megatron` takes.
      config: The model; None reads the settings of the run, as `from_args`.

    Raises:
      FileNotFoundError: If there is no checkpoint.
      ValueError: If it is damaged, or its model cannot be carried over.
    """
    checkpoint = open_megatron(path)
    config = from_args(checkpoint.args) if config is None else config
    to_transformer_config(config)  # refuses what Megatron's layers cannot be
    return decoder_source(checkpoint.source, config), config


def save_megatron(
    path: str | os.PathLike[str],
    params: Any,
    config: DecoderConfig,
    *,
    format: Literal["torch_dist", "legacy"] = "torch_dist",
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
    """Writes a directory that Megatron's `--load` takes, without Megatron or torch.

    One tensor is gathered to the host at a time. The directory appears under its name
    when it is complete, by a rename; a failure leaves nothing.

    Args:
      path: A directory that does not exist yet, or is empty.
      params: Pytree of arrays, sharded in any way; this process holds all of them.
      config: The model, written as the settings of a run.
      format: `"torch_dist"`, which any run reads, or `"legacy"` (`--ckpt-format
        torch`), which only one with these parallel sizes does.
      iteration: Steps of training done; None writes a `release`.
      tensor_parallel: Tensor-parallel ranks, of experts too; legacy alone, as are the
        next three.
      pipeline_parallel: Pipeline stages.
      virtual_pipeline: Model chunks a stage; None means one.
      expert_parallel: Expert-parallel ranks.
      make_vocab_size_divisible_by: Of what, times the tensor-parallel ranks, rows of
        zeros make the vocabulary a multiple.
      flags: Further settings of the run, such as `{"transformer_impl": "local"}`.
      max_file_bytes: Bytes of a `torch_dist` file after which another is begun.
      progress: Called with bytes written, and bytes in all, after each tensor.

    Raises:
      ValueError: If `path` is taken, tree and config do not fit, Megatron's layers
        cannot be this model's, or it cannot be dealt out so; nothing is written.
    """
    check_local(path)
    source = megatron_tensors(params, config)
    sizes = {
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
        "virtual_pipeline": virtual_pipeline,
        "expert_parallel": expert_parallel,
    }
    to_transformer_config(config, **sizes)  # refuses what cannot be dealt out
    args = to_args(
        dataclasses.replace(config, dtype=_main_dtype(source)),
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        flags=flags,
    )
    write_megatron(
        path,
        source,
        args,
        format=format,
        iteration=iteration,
        tp=tensor_parallel,
        pp=pipeline_parallel,
        ep=expert_parallel,
        vpp=virtual_pipeline or 1,
        max_file_bytes=max_file_bytes,
        progress=progress,
    )


def _main_dtype(source: Source) -> str:
    """Returns the dtype of most numbers: what a run has to hold all of them in."""
    sizes = Counter[str]()
    for key in source.keys():
        sizes[source.dtype(key).name] += math.prod(source.shape(key))
    return sizes.most_common(1)[0][0]


def decoder_source(source: Source, config: DecoderConfig) -> Source:
    """Presents a model's tensors as `weight_rules` see them.

    Args:
      source: By canonical name, with the vocabulary padded.
      config: The model.

    Returns:
      The same, the vocabulary without padding, `linear_qkv` in groups.

    Raises:
      ValueError: If the vocabulary has fewer rows than words.
    """
    return Regrouped(trim_vocab(source, config.vocab_size), grouped_shapes(config))


def megatron_tensors(params: Any, config: DecoderConfig) -> Source:
    """Presents a decoder's weights as Megatron's tensors, made when they are read.

    Args:
      params: Pytree of arrays, sharded in any way; this process holds all of them.
      config: The model.

    Returns:
      Tensors by canonical name, whole, the vocabulary not padded.

    Raises:
      ValueError: If tree and config do not fit, Megatron cannot say the config, or
        part of an array is another process's; all of it is listed.
    """
    to_transformer_config(config)
    leaves = named_leaves(arrays_of(params))
    mapping = weight_mapping(config)
    mapping.check(leaves)
    _check_addressable(leaves)
    grouped = grouped_shapes(config)
    pieces = mapping.by_source()
    tensors = {
        key: _Assembly(
            tuple(pieces[key]), leaves, dtype, _NUM_FACTORS if key in grouped else 1
        )
        for key, (_, dtype) in entries_of(pieces, leaves, None).items()
    }
    return TensorSource("the tree", MappingProxyType(tensors))


def _check_addressable(leaves: Mapping[str, Any]) -> None:
    elsewhere = [
        f"  {name}"
        for name, leaf in leaves.items()
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    ]
    if elsewhere:
        raise ValueError(
            "Other processes hold part of these leaves; save from one process that "
            "holds them all:\n" + "\n".join(elsewhere)
        )


@dataclasses.dataclass(frozen=True)
class _Assembly:
    """A tensor that is put together from sections of leaves.

    Args:
      pieces: The sections.
      leaves: The tree's leaves by path.
      dtype: Its dtype, and that of the leaves.
      num_factors: Dims of the rules' shape that are the first dim of the tensor.
    """

    pieces: tuple[Piece, ...]
    leaves: Mapping[str, Any]
    dtype: np.dtype
    num_factors: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        factored = self.pieces[0].source_shape
        rows = math.prod(factored[: self.num_factors])
        return (rows, *factored[self.num_factors :])

    def read(self, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Gathers the tensor to the host, and cuts what `slices` says."""
        tensor = np.empty(self.pieces[0].source_shape, self.dtype)
        with workers() as pool:
            assemble(pool, self.pieces, self.leaves, tensor)
        return tensor.reshape(self.shape)[as_index(complete(slices, self.shape))]
