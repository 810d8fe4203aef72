"""Runs the tests marked `long` and records what came out: `make test-long`."""

from __future__ import annotations

import argparse
import sys
import time

import pytest
import result

RESULTS = result.RESULTS / "long_tests.json"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class Outcomes:
    """Counts what pytest reports, by file."""

    def __init__(self):
        self.by_file: dict[str, dict[str, int]] = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            counts = self.by_file.setdefault(report.nodeid.partition("::")[0], {})
            counts[report.outcome] = counts.get(report.outcome, 0) + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    _, arguments = parser.parse_known_args()
    # Forced: tests fail or pass on a busy machine too. The JSON says that it was one.
    recorded = argparse.Namespace(out=RESULTS, force=True)
    conditions = result.begin(recorded, PACKAGES)
    outcomes, start = Outcomes(), time.monotonic()
    status = pytest.main(["-m", "long", *arguments], plugins=[outcomes])
    found = {
        "exit_status": int(status),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "outcomes": outcomes.by_file,
    }
    result.write(recorded, conditions, found)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
