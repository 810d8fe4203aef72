"""Runs the tests marked `long` and records what came out: `make test-long`."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent / "results" / "long_tests.json"
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
    outcomes, start = Outcomes(), time.monotonic()
    status = pytest.main(["-m", "long", *arguments], plugins=[outcomes])
    record = {
        "command": "make test-long",
        "exit_status": int(status),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "outcomes": outcomes.by_file,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, 8 simulated CPU devices",
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    print(f"recorded in {RESULTS}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
