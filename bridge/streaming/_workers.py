"""The threads that copy: numpy lets go of the interpreter while it does."""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

_MAX_WORKERS = 8  # memory is as fast as that many cores; each holds a band


@contextlib.contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Starts a thread for each core; a failure cancels what has not begun."""
    count = min(_MAX_WORKERS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix="bridge")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
