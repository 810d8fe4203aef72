"""Loading: a mould is filled from a checkpoint, shard by shard."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bridge._box import (
    Box,
    as_index,
    complete,
    cover,
    overlap,
    relative,
    shape_of,
    whole,
)
from bridge._config import find_family, from_hf_config
from bridge._mapping import Mapping
from bridge._piece import Piece
from bridge._source import Source, open_checkpoint
from bridge._tree import named_leaves
from bridge.models import DecoderConfig

Progress = Callable[[int, int], None]
Shards = dict[Box, np.ndarray]


def load_hf(
    path: str | os.PathLike[str],
    mould: Any,
    *,
    config: DecoderConfig | None = None,
    progress: Progress | None = None,
) -> Any:
    """Fills a mould with the weights of a Hugging Face checkpoint.

    Only what this process's shards need is read, and each byte of it once; host
    memory holds the shards of one leaf and one tensor of the file. Everything is
    checked against config and headers before the first weight is read.

    Values are cast to the dtype of the mould between floating dtypes (bfloat16 files
    fill float32 main weights exactly; the other way rounds); any other difference of
    dtype is an error. Tensors or leaves without a counterpart are errors too.

    Args:
      path: A directory with `config.json` and safetensors files, or one such file.
      mould: Any pytree of `jax.ShapeDtypeStruct`. A leaf is born in its `.sharding`;
        without one, on the default device.
      config: The model; None reads `config.json`.
      progress: Called with bytes of the checkpoint done, and bytes in all, after each
        tensor of the file.

    Returns:
      The mould's tree, with arrays for leaves.

    Raises:
      FileNotFoundError: If there is no checkpoint or no config.
      ValueError: If the checkpoint is damaged, its family not supported, or mould,
        config and checkpoint do not fit; everything that does not fit is listed.
    """
    source = open_checkpoint(path)
    config = config or from_hf_config(path)
    mapping = find_family(config.model_type).mapping_for(config, source.keys())
    return load(source, mapping, mould, progress=progress)


def load(
    source: Source, mapping: Mapping, mould: Any, *, progress: Progress | None = None
) -> Any:
    """Fills a mould from any source by any mapping; see `load_hf`."""
    leaves = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)
        )
        for name, leaf in named_leaves(mould).items()
    }
    mapping.check(leaves, source)
    _check_shardings(leaves)
    pieces = mapping.by_destination()
    tick = _counter(source, mapping, progress)
    arrays = [_fill(source, pieces[name], leaf, tick) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(mould), arrays)


def _check_shardings(leaves: dict[str, jax.ShapeDtypeStruct]) -> None:
    wrong = []
    for name, leaf in leaves.items():
        try:
            if leaf.sharding is not None:
                leaf.sharding.shard_shape(leaf.shape)
        except ValueError as error:
            wrong.append(f"  {name}: {error}")
    if wrong:
        raise ValueError("The mould cannot be sharded so:\n" + "\n".join(wrong))


def _counter(
    source: Source, mapping: Mapping, progress: Progress | None
) -> Callable[[Piece], None]:
    def nbytes(piece: Piece) -> int:
        return piece.num_elements * source.dtype(piece.source).itemsize

    total = sum(map(nbytes, mapping.pieces))
    done = 0

    def tick(piece: Piece) -> None:
        nonlocal done
        done += nbytes(piece)
        if progress is not None:
            progress(done, total)

    return tick


def _fill(
    source: Source,
    pieces: list[Piece],
    leaf: jax.ShapeDtypeStruct,
    tick: Callable[[Piece], None],
) -> jax.Array:
    shards = _empty_shards(leaf)
    for piece in pieces:
        _fill_shards(source, piece, shards)
        tick(piece)
    if leaf.sharding is None:
        return jax.device_put(*shards.values())
    return jax.make_array_from_callback(
        leaf.shape,
        leaf.sharding,
        lambda index: shards[complete(index or (), leaf.shape)],
    )


def _empty_shards(leaf: jax.ShapeDtypeStruct) -> Shards:
    """Allocates what this process will hold; replicas share one array."""
    boxes = {whole(leaf.shape)}
    if leaf.sharding is not None:
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        boxes = {complete(index or (), leaf.shape) for index in indices.values()}
    return {box: np.empty(shape_of(box), leaf.dtype) for box in boxes}


def _fill_shards(source: Source, piece: Piece, shards: Shards) -> None:
    """Copies one section of the checkpoint to the shards that need part of it."""
    wanted = [
        (box, common)
        for box in shards
        if (common := overlap(box, piece.destination_box)) is not None
    ]
    for group in _sharing_rows(piece, wanted):
        to_read = [piece.box_to_read(common) for _, common in group]
        hull = cover(to_read)
        read = source.read(piece.source, as_index(hull))
        for (box, common), part in zip(group, to_read, strict=True):
            values = piece.to_destination(read[as_index(relative(part, hull))], common)
            shards[box][as_index(relative(common, box))] = values


def _sharing_rows(
    piece: Piece, wanted: list[tuple[Box, Box]]
) -> list[list[tuple[Box, Box]]]:
    """Groups shards that need the same rows of the file, to read those once.

    Eight shards of the rows are eight reads of an eighth; eight shards of the columns
    are one read of everything, where one each would read the file eight times.
    """
    groups, end = [], -1
    for box, common in sorted(wanted, key=lambda w: piece.box_to_read(w[1])):
        rows = piece.box_to_read(common)[:1]
        if groups and (not rows or rows[0].start < end):
            groups[-1].append((box, common))
        else:
            groups.append([(box, common)])
        end = max([end, *(r.stop for r in rows)])
    return groups
