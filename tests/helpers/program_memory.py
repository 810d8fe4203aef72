"""Lets go of compiled programs before the kernel maps no more of them.

XLA:CPU of jaxlib 0.10 maps about four pieces of memory for each program it compiles,
and jax keeps each program that a live function compiled. Linux allows a process 65,530
maps; past that, the compiler ends with a segmentation fault rather than an error, and
with it the worker that has run thousands of tests.
"""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

MAPS = Path("/proc/self/maps")  # A line each. Linux alone has it, and needs it.
MOST_MAPS = 20_000  # Less than a third of the limit; one test adds hundreds at most.
EVERY = 10  # tests between two counts, each of a few milliseconds

_since_count = pytest.StashKey[int]()


def count_maps() -> int:
    """Pieces of memory that this process has mapped; 0 where the kernel cannot say."""
    if not MAPS.exists():
        return 0
    with MAPS.open("rb") as lines:
        return sum(1 for _ in lines)


def let_go(most: int) -> bool:
    """Clears jax's caches if more than `most` pieces are mapped; says whether."""
    if count_maps() <= most:
        return False
    jax.clear_caches()
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Counts after some tests, and lets go where there are too many."""
    tests = item.config.stash.get(_since_count, 0) + 1
    item.config.stash[_since_count] = tests % EVERY
    if tests == EVERY:
        let_go(MOST_MAPS)
