"""The weights of a sharded tree by their HF names, one on the host at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import DTypeLike

from bridge._tree import arrays_of, named_leaves
from bridge.hf._config import find_family
from bridge.models import DecoderConfig
from bridge.rules._piece import Piece
from bridge.streaming._export import tensors_of
from bridge.streaming._files import Entries, entries_of

Prepared = tuple[Entries, dict[str, list[Piece]], dict[str, Any]]
"""Shape and dtype of each tensor, its pieces, and the leaves of the tree."""


def named_tensors(
    params: Any, config: DecoderConfig, *, dtype: DTypeLike | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each tensor of a Hugging Face checkpoint, with its name.

    Each is gathered to the host when it is asked for. In a job of several processes all
    of them iterate alike, and all get every tensor. `torch.from_numpy` makes what the
    loaders of vLLM (`model.load_weights`) and SGLang (`update_weights_from_tensor`)
    take; for bfloat16, which numpy has not, `array.view(np.int16)` and torch's `view`.

    Args:
      params: Pytree of arrays, sharded in any way, as `bridge.load_hf` returns it.
      config: Config of the model.
      dtype: Floating dtype of the tensors; None for those of the leaves.

    Raises:
      ValueError: If tree and config do not fit; everything that does not fit is listed,
        before anything is gathered.

    Examples:
      >>> tensors = bridge.handover.named_tensors(params, config, dtype="bfloat16")
      >>> next(tensors)[0]
      'model.embed_tokens.weight'
    """
    return tensors_of(*prepare(params, config, dtype))


def prepare(params: Any, config: DecoderConfig, dtype: DTypeLike | None) -> Prepared:
    """Finds the tensors of a tree, before any is gathered.

    Args:
      params: Pytree of arrays.
      config: Config of the model.
      dtype: Floating dtype of the tensors; None for those of the leaves.

    Raises:
      ValueError: If tree and config do not fit.
    """
    leaves = named_leaves(arrays_of(params))
    mapping = find_family(config.model_type).mapping(config)
    mapping.check(leaves)
    pieces = mapping.by_source()
    return entries_of(pieces, leaves, dtype), pieces, leaves
