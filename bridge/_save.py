"""Saving: a tree is written as a Hugging Face checkpoint, tensor by tensor."""

import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import DTypeLike

from bridge._box import as_index, shape_of
from bridge._config import CONFIG_NAME, find_family, to_hf_config
from bridge._files import Entries, assign_files, entries_of, index_of, nbytes
from bridge._load import Progress
from bridge._piece import Piece
from bridge._safetensors import encode_header
from bridge._source import INDEX_NAME
from bridge._tree import named_leaves
from bridge.models import DecoderConfig


def save_hf(
    path: str | os.PathLike[str],
    params: Any,
    config: DecoderConfig,
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 5 * 10**9,
    progress: Progress | None = None,
) -> None:
    """Writes a directory that transformers loads.

    One tensor is gathered to the host at a time. The directory appears under its name
    when it is complete, by a rename; a failure leaves nothing.

    Args:
      path: A directory that does not exist yet, or is empty.
      params: Pytree of arrays, sharded in any way, as `load_hf` returns it.
      config: The model, written as `config.json`.
      dtype: Floating dtype of the files; None keeps each leaf's own, so that what was
        loaded without a cast is written back bit by bit.
      max_shard_bytes: Bytes of tensors in a file; above it, several files and an
        index are written. A tensor is never cut, however large.
      progress: Called with bytes written, and bytes in all, after each tensor.

    Raises:
      ValueError: If `path` is taken, or tree and config do not fit; everything that
        does not fit is listed, and nothing is written.
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(
            f"Cannot save to '{path}': it exists and is not an empty directory. Give "
            "a new name, or remove it first."
        )
    leaves = named_leaves(params)
    mapping = find_family(config.model_type).mapping(config)
    mapping.check(leaves)
    pieces = mapping.by_source()
    tensors = entries_of(pieces, leaves, dtype)
    files = assign_files(tensors, max_shard_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temp:
        # Not the temporary directory itself: that one is closed to other users.
        directory = Path(temp) / "checkpoint"
        directory.mkdir()
        _write_weights(directory, files, pieces, leaves, progress)
        if len(files) > 1:
            _write_json(directory / INDEX_NAME, index_of(files))
        _write_configs(directory, config, tensors)
        directory.rename(path)


def _write_weights(
    directory: Path,
    files: dict[str, Entries],
    pieces: dict[str, list[Piece]],
    leaves: dict[str, Any],
    progress: Progress | None,
) -> None:
    total = sum(
        nbytes(entry) for entries in files.values() for entry in entries.values()
    )
    done = 0
    for name, entries in files.items():
        # Widest first: every tensor then starts at a multiple of its item size.
        entries = dict(sorted(entries.items(), key=lambda e: -e[1][1].itemsize))
        with (directory / name).open("wb") as stream:
            stream.write(encode_header(entries))
            for key, entry in entries.items():
                stream.write(_tensor_bytes(pieces[key], leaves, *entry))
                done += nbytes(entry)
                if progress is not None:
                    progress(done, total)
            stream.flush()
            os.fsync(stream.fileno())


def _tensor_bytes(
    pieces: list[Piece],
    leaves: dict[str, Any],
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> memoryview:
    # Filled in place, so that it is in C order whatever the layouts return.
    tensor = np.empty(shape, dtype)
    for piece in pieces:
        section = _gather(leaves[piece.destination], piece)
        tensor[as_index(piece.source_box)] = piece.to_source(section)
    return tensor.reshape(-1).view(np.uint8).data


def _gather(leaf: Any, piece: Piece) -> np.ndarray:
    """Brings one section of a leaf to the host: a layer, not the stack of them."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)[as_index(piece.destination_box)]
    starts = tuple(r.start for r in piece.destination_box)
    sizes = shape_of(piece.destination_box)
    if isinstance(leaf.sharding, jax.sharding.NamedSharding):
        replicated = jax.sharding.NamedSharding(
            leaf.sharding.mesh, jax.sharding.PartitionSpec()
        )
    else:
        replicated = leaf.sharding
    cut = jax.jit(jax.lax.dynamic_slice, static_argnums=2, out_shardings=replicated)
    return np.asarray(cut(leaf, starts, sizes))


def _write_configs(directory: Path, config: DecoderConfig, entries: Entries) -> None:
    # The dtype of most bytes: what transformers will load everything as.
    totals: dict[np.dtype, int] = {}
    for shape, dtype in entries.values():
        totals[dtype] = totals.get(dtype, 0) + math.prod(shape) * dtype.itemsize
    dtype = max(totals, key=lambda dtype: totals[dtype])
    fields = to_hf_config(dataclasses.replace(config, dtype=dtype.name))
    _write_json(directory / CONFIG_NAME, fields)
    tokens = {
        name: fields[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if fields[name] is not None
    }
    if tokens:  # without it transformers generates past the end of the text
        _write_json(
            directory / "generation_config.json",
            {"_from_model_config": True, **tokens},
        )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
