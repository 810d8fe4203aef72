"""What the processes of a job tell each other.

Through the key-value store of `jax.distributed`, not by a collective: that would wait
for a process that is gone, without end and without a word.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed

# How long a process may be behind the others: it may read all of its share alone.
TIMEOUT_SECS = 1800.0
# In which those that came tell each other, once the time is over.
_ROLL_CALL_SECS = 1.0
# Every process passes the same points in the same order; so the number names the point.
_points = itertools.count()


@contextlib.contextmanager
def agreeing() -> Iterator[None]:
    """Ends in every process alike: the others of one that fails would wait for ever.

    Every process must enter it at the same place of the program. A job of one process
    pays nothing.

    Raises:
      BaseException: What was raised inside, in the process where it was.
      RuntimeError: In the processes where nothing was.
      TimeoutError: If some do not come to its end within `TIMEOUT_SECS`; it names them.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(TimeoutError):  # What was raised says more.
            _failed(True)
        raise
    if failed := _failed(False):
        raise RuntimeError(
            f"Processes {failed} failed and said why; this one stops with them."
        )


def _failed(here: bool) -> list[int]:
    """Which processes failed, once all have come."""
    if jax.process_count() == 1:
        return []
    client: Any = distributed.global_state.client
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
            f"within {TIMEOUT_SECS:g} s to where the others wait for them. They hang "
            "or are gone."
        ) from error


def _absent(client: Any, point: str) -> list[int]:
    client.key_value_set(f"{point}/here/{jax.process_index()}", "")
    time.sleep(_ROLL_CALL_SECS)
    here = _ranks(client, f"{point}/here/")
    return sorted(set(range(jax.process_count())) - set(here))


def _ranks(client: Any, directory: str) -> list[int]:
    found = client.key_value_dir_get(directory)
    return sorted(int(key.rpartition("/")[2]) for key, _ in found)
