"""Loading: a mould is filled from a checkpoint, shard by shard."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import jax

from bridge._config import find_family, from_hf_config
from bridge._cooperate import fill_together, must_cooperate
from bridge._fill import start_piece
from bridge._mapping import Mapping
from bridge._piece import Piece
from bridge._processes import agreeing
from bridge._shards import Shards, empty_shards, to_array
from bridge._source import Source, open_checkpoint
from bridge._tree import named_leaves
from bridge._workers import workers
from bridge.models import DecoderConfig

Progress = Callable[[int, int], None]


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
    mapping = find_family(config.model_type).mapping(config)
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
    arrays = _fill_all(source, pieces, leaves, tick)
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


def _fill_all(
    source: Source,
    pieces: dict[str, list[Piece]],
    leaves: dict[str, jax.ShapeDtypeStruct],
    tick: Callable[[Piece], None],
) -> list[jax.Array]:
    """Fills leaf after leaf; the reads of the next begin before one is done."""
    arrays, started = [], deque()
    with workers() as pool:
        for name, leaf in leaves.items():
            if must_cooperate(leaf, pieces[name]):
                while started:
                    arrays.append(_finish(*started.popleft(), tick))
                arrays.append(fill_together(pool, source, pieces[name], leaf, tick))
                continue
            started.append(_start(pool, source, pieces[name], leaf))
            if len(started) > 1:
                arrays.append(_finish(*started.popleft(), tick))
        while started:
            arrays.append(_finish(*started.popleft(), tick))
    return arrays


def _start(
    pool: Executor, source: Source, pieces: list[Piece], leaf: jax.ShapeDtypeStruct
) -> tuple[jax.ShapeDtypeStruct, Shards, list[tuple[Piece, list[Future[None]]]]]:
    shards = empty_shards(leaf)
    tasks = [(piece, start_piece(pool, source, piece, shards)) for piece in pieces]
    return leaf, shards, tasks


def _finish(
    leaf: jax.ShapeDtypeStruct,
    shards: Shards,
    tasks: list[tuple[Piece, list[Future[None]]]],
    tick: Callable[[Piece], None],
) -> jax.Array:
    with agreeing():
        for piece, futures in tasks:
            for future in futures:
                future.result()
            tick(piece)
    return to_array(leaf, shards)


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
