"""Loading: a mould is filled from a checkpoint, shard by shard."""

import dataclasses
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import jax

from bridge._config import find_family, from_hf_config
from bridge._cooperate import fill_together, put_together_by_devices
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
Tick = Callable[[Piece], None]


def load_hf(
    path: str | os.PathLike[str],
    mould: Any,
    *,
    config: DecoderConfig | None = None,
    progress: Progress | None = None,
) -> Any:
    """Fills a mould with the weights of a Hugging Face checkpoint.

    Only what this process's shards need is read, and each byte of it once. On CPU the
    host holds the arrays themselves and a few megabytes a core; for other devices, two
    tensors of the file. In a job of several processes all of them must call this
    alike: a byte is read by one of them. Everything is checked against config and
    headers before the first weight is read.

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
    tick: Tick,
) -> list[jax.Array]:
    """Fills leaf after leaf; reads for the next begin before one is done."""
    arrays = []
    started: deque[_Started] = deque()
    with workers() as pool:
        for name, leaf in leaves.items():
            by_devices = put_together_by_devices(leaf, pieces[name])
            while len(started) > (not by_devices):
                arrays.append(started.popleft().finish(tick))
            if by_devices:
                arrays.append(fill_together(pool, source, pieces[name], leaf, tick))
            else:
                started.append(_start(pool, source, pieces[name], leaf))
        arrays += [one.finish(tick) for one in started]
    return arrays


@dataclasses.dataclass(frozen=True)
class _Started:
    """A leaf whose shards are being filled, and what to wait for."""

    leaf: jax.ShapeDtypeStruct
    shards: Shards
    tasks: list[tuple[Piece, list[Future[None]]]]

    def finish(self, tick: Tick) -> jax.Array:
        """Waits for every section, and hands the shards over."""
        with agreeing():
            for piece, futures in self.tasks:
                for future in futures:
                    future.result()
                tick(piece)
            return to_array(self.leaf, self.shards)


def _start(
    pool: Executor, source: Source, pieces: list[Piece], leaf: jax.ShapeDtypeStruct
) -> _Started:
    shards = empty_shards(leaf)
    tasks = [(piece, start_piece(pool, source, piece, shards)) for piece in pieces]
    return _Started(leaf, shards, tasks)


def _counter(source: Source, mapping: Mapping, progress: Progress | None) -> Tick:
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
