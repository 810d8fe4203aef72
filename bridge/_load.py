"""Loading: a mould is filled from a checkpoint, shard by shard."""

import os
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import jax

from bridge._cooperate import fill_together, put_together
from bridge._fill import start_piece
from bridge._hf_checkpoint import open_hf
from bridge._mapping import Mapping
from bridge._piece import Piece
from bridge._processes import agreeing
from bridge._shards import empty_shards, is_on_host, to_array
from bridge._source import Source
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
    source, _, mapping = open_hf(path, config)
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
    in_order = [arrays[name] for name in leaves]
    return jax.tree.unflatten(jax.tree.structure(mould), in_order)


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
) -> dict[str, jax.Array]:
    """Fills every leaf; what is filled in place, in the order of the file."""
    arrays = {}
    by_devices = {n for n, leaf in leaves.items() if put_together(leaf, pieces[n])}
    in_place = [n for n in leaves if n not in by_devices and is_on_host(leaves[n])]
    others = [[n] for n in leaves if n not in by_devices and n not in in_place]
    with workers() as pool:
        for names in [in_place, *others]:
            batch = {name: leaves[name] for name in names}
            arrays |= _fill_batch(pool, source, pieces, batch, tick)
        for name in leaves:
            if name in by_devices:
                arrays[name] = fill_together(
                    pool, source, pieces[name], leaves[name], tick
                )
    return arrays


def _fill_batch(
    pool: Executor,
    source: Source,
    pieces: dict[str, list[Piece]],
    leaves: dict[str, jax.ShapeDtypeStruct],
    tick: Tick,
) -> dict[str, jax.Array]:
    shards = {name: empty_shards(leaf) for name, leaf in leaves.items()}
    position = {key: i for i, key in enumerate(source.keys())}
    wanted = [(name, piece) for name in leaves for piece in pieces[name]]
    wanted.sort(key=lambda w: (position[w[1].source], w[1].source_box))
    alone = jax.process_count() == 1
    with agreeing():
        started = [
            (piece, start_piece(pool, source, piece, shards[name], ahead=alone))
            for name, piece in wanted
        ]
        for piece, futures in started:
            for future in futures:
                future.result()
            tick(piece)
        return {name: to_array(leaf, shards[name]) for name, leaf in leaves.items()}


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
