"""Decoder weights: conversion to and from Megatron checkpoints."""

import dataclasses
import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from bridge._box import as_index, complete
from bridge._tree import arrays_of, named_leaves
from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.hf._import_plan import ImportPlan, plan_of
from bridge.megatron._vocab import trim_vocab
from bridge.megatron._weight_rules import grouped_shapes, weight_mapping
from bridge.megatron.config._args import from_args
from bridge.megatron.config._layers_check import check_layers
from bridge.megatron.read._checkpoint import open_megatron
from bridge.megatron.read._regrouped import Regrouped
from bridge.models import DecoderConfig
from bridge.rules._piece import Piece
from bridge.streaming._export import assemble
from bridge.streaming._files import entries_of
from bridge.streaming._lazy import LazyLeaf, lazy_tree
from bridge.streaming._load import Progress, load
from bridge.streaming._workers import workers

# The rows of `linear_qkv` factor into groups, parts of a group, and head_dim.
_NUM_FACTORS = 3


def load_megatron(
    path: str | os.PathLike[str],
    like: Any,
    *,
    config: DecoderConfig | None = None,
    progress: Progress | None = None,
) -> Any:
    """Loads the weights of a Megatron checkpoint of any format.

    Needs neither Megatron nor torch. Like `bridge.load_hf`, it reads only what this
    process's shards need, and validates everything before it reads the first weight.

    Args:
      path: Checkpoint directory, as `open_megatron` takes it.
      like: Abstract parameters: any pytree of `jax.ShapeDtypeStruct`. Each array is
        created with the leaf's `.sharding`, or on the default device if it is None.
      config: Model config; None reads it from the run's settings with `from_args`. For
        a hybrid run it must be given: that of a Nemotron-H.
      progress: Called after each tensor of the checkpoint with bytes read and total
        bytes.

    Returns:
      Pytree of arrays with the structure of `like`.

    Raises:
      FileNotFoundError: If there is no checkpoint.
      ValueError: If the checkpoint is damaged, if its model is not supported, or if
        `like`, `config` and checkpoint do not match; all mismatches are listed.

    Examples:
      >>> bridge.save_megatron(path, params, config)
      >>> loaded = bridge.load_megatron(path, like)
      >>> jax.tree.all(jax.tree.map(jnp.array_equal, loaded, params))
      True
    """
    source, config = open_decoder(path, config)
    return load(source, weight_mapping(config), like, progress=progress)


def plan_megatron(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    config: DecoderConfig | None = None,
) -> ImportPlan:
    """Returns the import plan of `load_megatron`, without reading any weight.

    Args:
      path: Checkpoint directory, as `open_megatron` takes it.
      like: Abstract parameters, as `load_megatron` takes them; None means every leaf
        unsharded and in the dtype of its tensors.
      config: Model config; None reads it from the run's settings.

    Returns:
      Import plan of the checkpoint.

    Raises:
      FileNotFoundError: If there is no checkpoint.
      ValueError: For the reasons given in `load_megatron`.
    """
    source, config = open_decoder(path, config)
    return plan_of(source, weight_mapping(config), config, like)


def lazy_megatron(
    path: str | os.PathLike[str], config: DecoderConfig | None = None
) -> tuple[dict[str, LazyLeaf], DecoderConfig]:
    """Opens a checkpoint as a tree of lazy leaves, to convert it to another format.

    Args:
      path: Checkpoint directory, as `open_megatron` takes it.
      config: Model config; None reads it from the run's settings.

    Returns:
      Lazy leaves by dotted path, and the model config. No weight is read.

    Raises:
      FileNotFoundError: If there is no checkpoint.
      ValueError: For the reasons given in `load_megatron`.
    """
    source, config = open_decoder(path, config)
    return lazy_tree(source, weight_mapping(config)), config


def open_decoder(
    path: str | os.PathLike[str], config: DecoderConfig | None = None
) -> tuple[Source, DecoderConfig]:
    """Opens a checkpoint as a source for `weight_rules`, with its model config.

    Args:
      path: Checkpoint directory, as `open_megatron` takes it.
      config: Model config; None reads it from the run's settings with `from_args`.

    Returns:
      Source of the model's tensors, and the model config.

    Raises:
      FileNotFoundError: If there is no checkpoint.
      ValueError: If the checkpoint is damaged or its model is not supported.
    """
    checkpoint = open_megatron(path)
    config = from_args(checkpoint.args) if config is None else config
    check_layers(config)
    return decoder_source(checkpoint.source, config), config


def decoder_source(source: Source, config: DecoderConfig) -> Source:
    """Wraps a model's tensors in the shapes that `weight_rules` expect.

    Args:
      source: Tensors by canonical name, with a padded vocabulary.
      config: Model config.

    Returns:
      Lazy view of `source` with an unpadded vocabulary and with `linear_qkv` factored
      into groups.

    Raises:
      ValueError: If the vocabulary has fewer rows than `config.vocab_size`.
    """
    return Regrouped(trim_vocab(source, config.vocab_size), grouped_shapes(config))


def megatron_tensors(params: Any, config: DecoderConfig) -> Source:
    """Converts a decoder's weights to Megatron's tensors, each built when it is read.

    Args:
      params: Pytree of arrays with any sharding, fully addressable by this process.
      config: Model config.

    Returns:
      Unsharded tensors by canonical name, with an unpadded vocabulary.

    Raises:
      ValueError: If `params` and `config` do not match, if Megatron has no equivalent
        of the config, or if another process holds part of an array; all errors of a
        kind are listed.
    """
    check_layers(config)
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
    """Lazy tensor assembled from sections of leaves.

    Args:
      pieces: Sections of leaves that make up the tensor.
      leaves: Leaves of the parameter tree by path.
      dtype: Dtype of the tensor and of the leaves.
      num_factors: Number of leading dims of the rules' shape that are merged into the
        tensor's first dim.
    """

    pieces: tuple[Piece, ...]
    leaves: Mapping[str, Any]
    dtype: np.dtype
    num_factors: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint, without factors."""
        factored = self.pieces[0].source_shape
        rows = math.prod(factored[: self.num_factors])
        return (rows, *factored[self.num_factors :])

    def read(self, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Gathers the tensor to the host and returns the box that `slices` selects."""
        tensor = np.empty(self.pieces[0].source_shape, self.dtype)
        with workers() as pool:
            assemble(pool, self.pieces, self.leaves, tensor)
        return tensor.reshape(self.shape)[as_index(complete(slices, self.shape))]
