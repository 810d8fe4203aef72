"""Export of weights: a tensor is assembled while the previous one is written."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from bridge._reorder import Scratch
from bridge.formats._ranges import append
from bridge.formats._safetensors import encode_header
from bridge.rules._piece import Piece
from bridge.streaming._files import Entries, nbytes
from bridge.streaming._fill import start_tensor
from bridge.streaming._gather import gather
from bridge.streaming._processes import agreeing
from bridge.streaming._workers import workers


def write_weights(
    directory: Path | None,
    files: dict[str, Entries],
    pieces: dict[str, list[Piece]],
    leaves: dict[str, Any],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Writes all files. Collective: every process of the job must call it.

    Args:
      directory: Directory to write to; None in a process that only contributes its
        shards.
      files: Entries of each file, by file name.
      pieces: Pieces of each tensor.
      leaves: Leaves of the tree by path.
      progress: Callback, called with bytes written and total bytes after each tensor.
    """
    total = sum(nbytes(entry) for held in files.values() for entry in held.values())
    done = 0
    # Double buffering: one is filled while the other is written. The buffers are
    # reused, as faulting in fresh pages costs more than a copy.
    buffers = itertools.cycle((Scratch(), Scratch()))
    with workers() as pool:
        for name, entries in files.items():
            # Widest dtype first: every tensor then is aligned to its itemsize.
            entries = dict(sorted(entries.items(), key=lambda e: -e[1][1].itemsize))
            with _opened(None if directory is None else directory / name) as file:
                file.put(memoryview(encode_header(entries)))
                for key, entry in entries.items():
                    with agreeing():
                        tensor = next(buffers).take(*entry).array
                        assemble(pool, pieces[key], leaves, tensor)
                        file.put(tensor.reshape(-1).view(np.uint8).data)
                        done += nbytes(entry)
                        if progress is not None:
                            progress(done, total)


def tensors_of(
    entries: Entries, pieces: dict[str, list[Piece]], leaves: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields tensors with their names. Collective, as `write_weights` is.

    Args:
      entries: Shape and dtype of each tensor.
      pieces: Pieces of each tensor.
      leaves: Leaves of the tree by path.
    """
    with workers() as pool:
        for key, (shape, dtype) in entries.items():
            with agreeing():
                tensor = np.empty(shape, dtype)
                assemble(pool, pieces[key], leaves, tensor)
            yield key, tensor


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator["_Appender"]:
    """Opens a file and fsyncs it at the end; None discards what is written."""
    with contextlib.ExitStack() as stack:
        with agreeing():
            stream = None if path is None else path.open("wb", buffering=0)
            file = _Appender(stream and stack.enter_context(stream))
            stack.callback(file.thread.shutdown)
        yield file
        with agreeing():
            file.finish()


class _Appender:
    """Appender to a file that writes in a background thread, one buffer behind.

    Args:
      stream: Open file; None to discard all data.
    """

    def __init__(self, stream: FileIO | None):
        self.thread = ThreadPoolExecutor(1)
        self._stream = stream
        self._pending: list[Future[None]] = []

    def put(self, data: memoryview) -> None:
        """Waits for the previous write, then starts to write `data`."""
        self._wait()
        if self._stream is not None:
            self._pending.append(self.thread.submit(append, self._stream, data))

    def finish(self) -> None:
        """Waits until all data is on disk."""
        self._wait()
        if self._stream is not None:
            os.fsync(self._stream.fileno())

    def _wait(self) -> None:
        while self._pending:
            self._pending.pop().result()


def assemble(
    pool: Executor,
    pieces: Sequence[Piece],
    leaves: Mapping[str, Any],
    tensor: np.ndarray,
) -> None:
    """Gathers a tensor to the host, into a C-ordered array.

    Args:
      pool: Thread pool for the copies.
      pieces: All sections of the tensor.
      leaves: Leaves of the tree by path.
      tensor: Array to fill.
    """
    futures = []
    for piece in pieces:
        here = gather(leaves[piece.destination], piece)
        futures += start_tensor(pool, piece, here, tensor)
    for future in futures:
        future.result()
