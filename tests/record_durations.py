"""What tests cost: `python tests/record_durations.py [--show] build/junit.xml ...`.

Takes the JUnit reports of `make test-all` and records them in `tests/durations.json`:
what they hold replaces what was recorded; tests of files that they do not name keep
their durations while the file exists. With `--show` nothing is recorded, and the files
that cost most are listed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from helpers import tiers

SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--show", action="store_true", help="record nothing")
    args = parser.parse_args()
    new = {
        test: spent
        for report in args.reports
        for test, spent in tiers.junit_durations(report).items()
    }
    if args.show:
        show(new)
        return 0
    durations = tiers.merged(_recorded(), new)
    tiers.write_durations(durations)
    default = tiers.default_tier(durations)
    print(
        f"{len(durations)} tests, {sum(durations.values()):,.0f} CPU-seconds; "
        f"{len(default)} by default, {sum(durations[t] for t in default):,.0f} of "
        f"{tiers.BUDGET:,.0f}."
    )
    return 0


def _recorded() -> dict[str, float]:
    return tiers.read_durations() if tiers.DURATIONS.exists() else {}


def show(durations: dict[str, float]) -> None:
    """Prints the files that cost most, and the whole."""
    by_file: Counter[str] = Counter()
    for test, seconds in durations.items():
        by_file[test.partition("::")[0]] += seconds
    whole = sum(by_file.values())
    print(f"CPU-seconds of {len(durations)} tests: {whole:,.0f}")
    for file, seconds in by_file.most_common(SHOWN):
        print(f"{seconds:8,.1f}  {seconds / whole:4.0%}  {file}")


if __name__ == "__main__":
    sys.exit(main())
