"""A decoder's weights, to and from Megatron's checkpoints."""

import dataclasses
import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from bridge._box import as_index, complete
from bridge._files import entries_of
from bridge._load import Progress, load
from bridge._piece import Piece
from bridge._source import Source
from bridge._torch_zip import TensorSource
from bridge._tree import named_leaves
from bridge.megatron._args import from_args
from bridge.megatron._checkpoint import open_megatron
from bridge.megatron._regrouped import Regrouped
from bridge.megatron._transformer_config import to_transformer_config
from bridge.megatron._vocab import trim_vocab
from bridge.megatron._weight_rules import grouped_shapes, weight_mapping
from bridge.models import DecoderConfig

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
    checkpoint = open_megatron(path)
    config = from_args(checkpoint.args) if config is None else config
    to_transformer_config(config)  # refuses what Megatron's layers cannot be
    source = decoder_source(checkpoint.source, config)
    return load(source, weight_mapping(config), mould, progress=progress)


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
    leaves = named_leaves(params)
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
        for piece in self.pieces:
            section = self.leaves[piece.destination][as_index(piece.destination_box)]
            tensor[as_index(piece.source_box)] = piece.to_source(np.asarray(section))
        return tensor.reshape(self.shape)[as_index(complete(slices, self.shape))]
