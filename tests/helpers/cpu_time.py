"""CPU-seconds of each test, as a property of its report: what durations are made of.

Wall time says as much of the machine as of the test. What is measured is the process
and those of its children that ended, from setup to teardown; a fixture's time falls
on the first test that asks for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from helpers.tiers import PROPERTY

_started = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """CPU time of this process and of its children that ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Notes where a test begins."""
    item.stash[_started] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Adds the time that a test took to its last report."""
    report = yield
    if report.when == "teardown":
        spent = cpu_seconds() - item.stash[_started]
        report.user_properties.append((PROPERTY, f"{spent:.3f}"))
    return report
