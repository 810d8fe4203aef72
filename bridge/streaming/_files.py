"""Contents of a checkpoint's files, determined before any data is written."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from bridge.formats._safetensors import DTYPE_NAMES
from bridge.formats._weight_files import SINGLE_NAME
from bridge.rules._mapping import castable
from bridge.rules._piece import Piece

Entry = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of a tensor to be written."""

Entries = dict[str, Entry]


def nbytes(entry: Entry) -> int:
    """Returns the size of a tensor in bytes."""
    shape, dtype = entry
    return math.prod(shape) * dtype.itemsize


def entries_of(
    pieces: dict[str, list[Piece]], leaves: dict[str, Any], dtype: DTypeLike | None
) -> Entries:
    """Returns shape and dtype of every tensor to be written.

    Args:
      pieces: Pieces of each tensor.
      leaves: Leaves of the tree by path.
      dtype: Dtype of all tensors; None for the dtypes of the leaves.

    Raises:
      ValueError: If a leaf cannot be cast, or its dtype cannot be stored.
    """
    entries, wrong = {}, []
    for key, parts in pieces.items():
        stored = {jnp.dtype(leaves[part.destination].dtype) for part in parts}
        target = jnp.dtype(dtype) if dtype is not None else max(stored, key=str)
        integers = parts[0].integers
        if integers is not None:
            target = np.dtype(integers)
        is_table = integers is not None
        if len(stored) > 1 and dtype is None:
            wrong.append(f"  {key}: made of leaves of several dtypes, give a `dtype`")
        elif not all(castable(source, target, is_table=is_table) for source in stored):
            wrong.append(f"  {key}: {max(stored, key=str)} is not cast to {target}")
        elif target not in DTYPE_NAMES:
            wrong.append(f"  {key}: safetensors files do not know {target}")
        entries[key] = parts[0].source_shape, target
    if wrong:
        raise ValueError("Cannot save these dtypes:\n" + "\n".join(wrong))
    return entries


def assign_files(entries: Entries, max_shard_bytes: int) -> dict[str, Entries]:
    """Assigns tensors to files, in order.

    Args:
      entries: Shape and dtype of all tensors.
      max_shard_bytes: Maximum bytes of tensors in a file; a larger tensor gets a file
        of its own.

    Returns:
      Entries of each file, by file name.
    """
    shards: list[Entries] = [{}]
    filled = 0
    for key, entry in entries.items():
        size = nbytes(entry)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][key] = entry
        filled += size
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    count = len(shards)
    return {
        f"model-{i:05}-of-{count:05}.safetensors": shard
        for i, shard in enumerate(shards, start=1)
    }


def index_of(files: dict[str, Entries]) -> dict[str, Any]:
    """Returns the index of the files: the file name of each tensor."""
    entries = [entry for shard in files.values() for entry in shard.values()]
    metadata = {
        "total_parameters": sum(math.prod(shape) for shape, _ in entries),
        "total_size": sum(map(nbytes, entries)),
    }
    weight_map = {key: name for name, shard in files.items() for key in shard}
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
