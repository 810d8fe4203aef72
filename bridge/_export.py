"""Weights written file after file: a tensor is laid out while the last is written."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bridge._files import Entries, nbytes
from bridge._fill import start_tensor
from bridge._gather import gather
from bridge._piece import Piece
from bridge._processes import agreeing
from bridge._ranges import append
from bridge._safetensors import encode_header
from bridge._workers import workers

Put = Callable[[memoryview], None]


def write_weights(
    directory: Path | None,
    files: dict[str, Entries],
    pieces: dict[str, list[Piece]],
    leaves: dict[str, Any],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Writes all files. Every process of a job must call this alike.

    Args:
      directory: Where to; None in a process that only gives what it holds.
      files: What each file holds.
      pieces: The pieces of each tensor.
      leaves: The tree's leaves by path.
      progress: Called with bytes written, and bytes in all, after each tensor.
    """
    total = sum(nbytes(entry) for held in files.values() for entry in held.values())
    done = 0
    with workers() as pool:
        for name, entries in files.items():
            # Widest first: every tensor then starts at a multiple of its item size.
            entries = dict(sorted(entries.items(), key=lambda e: -e[1][1].itemsize))
            with _file(None if directory is None else directory / name) as put:
                put(memoryview(encode_header(entries)))
                for key, entry in entries.items():
                    with agreeing():
                        tensor = _tensor(pool, pieces[key], leaves, *entry)
                        put(tensor.reshape(-1).view(np.uint8).data)
                        done += nbytes(entry)
                        if progress is not None:
                            progress(done, total)


@contextlib.contextmanager
def _file(path: Path | None) -> Iterator[Put]:
    """Opens a file to which a thread appends, one piece behind; durable at the end."""
    with contextlib.ExitStack() as stack:
        pending: list[Future[None]] = []

        def put(data: memoryview) -> None:
            if thread is not None:
                wait(pending)
                pending.append(thread.submit(append, stream, data))

        with agreeing():
            stream = thread = None
            if path is not None:
                stream = stack.enter_context(path.open("wb", buffering=0))
                thread = stack.enter_context(ThreadPoolExecutor(1))
        yield put
        with agreeing():
            if stream is not None:
                wait(pending)
                os.fsync(stream.fileno())


def wait(pending: list[Future[None]]) -> None:
    """Waits for what was begun, and raises what it raised."""
    while pending:
        pending.pop().result()


def _tensor(
    pool: Executor,
    pieces: list[Piece],
    leaves: dict[str, Any],
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> np.ndarray:
    """Returns a tensor in C order, whatever the layouts return."""
    tensor = np.empty(shape, dtype)
    futures = []
    for piece in pieces:
        here = gather(leaves[piece.destination], piece)
        futures += start_tensor(pool, piece, here, tensor)
    wait(futures)
    return tensor
