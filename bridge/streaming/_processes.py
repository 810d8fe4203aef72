"""Agreement on failures between the processes of a job.

Uses the key-value store of `jax.distributed` instead of a collective, which would hang
silently if a process has died.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax

from bridge._compat import DISTRIBUTED_STATE

# Maximum delay of a process: it may have to read all of its share.
TIMEOUT_SECS = 1800.0
# Time for processes to announce themselves after a timeout.
_ROLL_CALL_SECS = 1.0
# Every process passes the same points in the same order, so a counter identifies them.
_points = itertools.count()


@contextlib.contextmanager
def agreeing() -> Iterator[None]:
    """Propagates a failure inside the context to all processes.

    Otherwise the other processes would wait forever for the failed one. Every process
    must enter the context at the same point of the program. With a single process it
    costs nothing.

    Raises:
      BaseException: Exception raised inside, in the process that raised it.
      RuntimeError: If another process failed.
      TimeoutError: If processes do not reach the end of the context within
        `TIMEOUT_SECS`; it names them.
    """
    try:
        yield
    except BaseException:
        # The original exception is more informative than a timeout of the barrier.
        with contextlib.suppress(TimeoutError):
            _failed(True)
        raise
    if failed := _failed(False):
        raise RuntimeError(
            f"Processes {failed} failed and reported why; this process stops too."
        )


def _failed(here: bool) -> list[int]:
    """Returns the ranks of the failed processes, after all have arrived."""
    if jax.process_count() == 1:
        return []
    client: Any = DISTRIBUTED_STATE.get().client
    point = f"bridge/{next(_points)}"
    if here:
        client.key_value_set(f"{point}/failed/{jax.process_index()}", "")
    _wait_for_all(client, point)
    return _ranks(client, f"{point}/failed/")


def _wait_for_all(client: Any, point: str) -> None:
    try:
        client.wait_at_barrier(point, int(1000 * TIMEOUT_SECS))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise TimeoutError(
            f"Processes {_absent(client, point)} of {jax.process_count()} did not come "
            f"within {TIMEOUT_SECS:g} s to the point where the others wait. They hang "
            "or have exited."
        ) from error


def _absent(client: Any, point: str) -> list[int]:
    client.key_value_set(f"{point}/here/{jax.process_index()}", "")
    time.sleep(_ROLL_CALL_SECS)
    here = _ranks(client, f"{point}/here/")
    return sorted(set(range(jax.process_count())) - set(here))


def _ranks(client: Any, directory: str) -> list[int]:
    found = client.key_value_dir_get(directory)
    return sorted(int(key.rpartition("/")[2]) for key, _ in found)
