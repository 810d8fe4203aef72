"""Loading of an abstract tree from any source, shard by shard."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import jax

from bridge._tree import named_leaves
from bridge.formats._source import Source
from bridge.rules._mapping import Mapping
from bridge.rules._piece import Piece
from bridge.streaming._cooperate import fill_together, put_together
from bridge.streaming._fill import start_piece
from bridge.streaming._processes import agreeing
from bridge.streaming._shards import empty_shards, is_on_host, to_array
from bridge.streaming._workers import workers

Progress = Callable[[int, int], None]
Tick = Callable[[Piece], None]


def load(
    source: Source, mapping: Mapping, like: Any, *, progress: Progress | None = None
) -> Any:
    """Loads an abstract tree from any source by any mapping.

    Args:
      source: Checkpoint to read.
      mapping: Rules of the model.
      like: Abstract tree: shape, dtype and optional sharding of each leaf, as in
        `bridge.load_hf`.
      progress: Callback, called with bytes done and total bytes.

    Returns:
      Tree of the same structure, with arrays as leaves.

    Raises:
      ValueError: If abstract tree, mapping and checkpoint do not match. All mismatches
        are listed.
    """
    leaves = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)
        )
        for name, leaf in named_leaves(like).items()
    }
    mapping.check(leaves, source)
    _check_shardings(leaves)
    _check_widths(leaves)
    pieces = mapping.by_destination()
    tick = _counter(source, mapping, progress)
    arrays = _fill_all(source, pieces, leaves, tick)
    in_order = [arrays[name] for name in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), in_order)


def _check_widths(leaves: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Refuses leaves that jax would make narrower, with other numbers."""
    wrong = [
        f"{name} ({leaf.dtype})"
        for name, leaf in leaves.items()
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
    ]
    if wrong:
        raise ValueError(
            f"`like` has {len(wrong)} leaf/leaves of 64 bits, {', '.join(wrong)}, and "
            "jax makes arrays of 32 bits. Set jax_enable_x64, or ask for 32 bits."
        )


def _check_shardings(leaves: dict[str, jax.ShapeDtypeStruct]) -> None:
    wrong = []
    for name, leaf in leaves.items():
        try:
            if leaf.sharding is not None:
                leaf.sharding.shard_shape(leaf.shape)
        except ValueError as error:
            wrong.append(f"  {name}: {error}")
    if wrong:
        raise ValueError("`like` cannot be sharded so:\n" + "\n".join(wrong))


def _fill_all(
    source: Source,
    pieces: dict[str, list[Piece]],
    leaves: dict[str, jax.ShapeDtypeStruct],
    tick: Tick,
) -> dict[str, jax.Array]:
    """Fills every leaf; those on the host together, in the order of the file.

    Leaves on other devices are filled one at a time, which bounds host memory.
    """
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
    # In the order of the file, so that reads are sequential.
    wanted.sort(key=lambda w: (position[w[1].source], w[1].source_box))
    alone = jax.process_count() == 1
    with agreeing():
        started = [
            (piece, start_piece(pool, source, piece, shards[name], ahead=alone))
            for name, piece in wanted
        ]
        for piece, futures in started:
            # Reversed, as the last future usually ends last: one wait instead of many.
            for future in reversed(futures):
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
