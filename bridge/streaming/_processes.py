"""What the processes of a job tell each other."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils


@contextlib.contextmanager
def agreeing() -> Iterator[None]:
    """Ends in every process alike: the others of one that fails would wait for ever.

    Every process must enter it at the same place of the program. A job of one process
    pays nothing.

    Raises:
      BaseException: What was raised inside, in the process where it was.
      RuntimeError: In the processes where nothing was.
    """
    try:
        yield
    except BaseException:
        _any_failed(True)
        raise
    if failed := _any_failed(False):
        raise RuntimeError(
            f"Processes {failed} failed and said why; this one stops with them."
        )


def _any_failed(failed: bool) -> list[int]:
    if jax.process_count() == 1:
        return []
    told = multihost_utils.process_allgather(np.array(failed))
    return np.flatnonzero(told).tolist()
