"""Thread pool for copies: numpy releases the GIL while it copies."""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

_MAX_WORKERS = 8  # more cores do not add memory bandwidth; each holds a band


@contextlib.contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Yields a pool of one thread per core, up to 8; its exit cancels pending tasks."""
    count = min(_MAX_WORKERS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix="bridge")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
