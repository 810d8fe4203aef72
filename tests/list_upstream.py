"""What upstream tests, pinned: `python tests/list_upstream.py NAME=CHECKOUT ...`.

Reads the checkouts of Megatron-LM and verl (`Megatron-LM=../Megatron-LM verl=../verl`)
and records in `tests/upstream.json` which test functions they have at which commit.
`tests/test_upstream.py` holds `tests/UPSTREAM.md` to that list. What came and went
since the list before is printed: rows of UPSTREAM.md to write, and rows to take out.
Nothing of a checkout is run or imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from helpers.upstream import PINNED, Pinned, named_tests, read_pinned

ROOTS = {
    "Megatron-LM": (
        "tests/unit_tests/distributed",
        "tests/unit_tests/dist_checkpointing",
        "tests/unit_tests/test_checkpointing.py",
    ),
    "verl": ("tests/special_distributed", "tests/test_protocol_on_cpu.py"),
}
"""The files and folders of each project that UPSTREAM.md is about."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="+", metavar="NAME=CHECKOUT")
    args = parser.parse_args()
    before = read_pinned() if PINNED.exists() else {}
    after = dict(before)
    for given in args.checkouts:
        name, _, checkout = given.partition("=")
        if name not in ROOTS or not Path(checkout).is_dir():
            parser.error(f"{given}: it is one of {', '.join(ROOTS)}, and its checkout")
        after[name] = pin(name, Path(checkout))
    for line in changes(before, after):
        print(line)
    recorded = {name: pinned.as_json() for name, pinned in sorted(after.items())}
    PINNED.write_text(json.dumps(recorded, indent=1) + "\n")
    return 0


def pin(name: str, checkout: Path) -> Pinned:
    """The tests of a checkout, as of its commit."""
    commit, date = git(checkout, "log", "-1", "--format=%H %cs").split()
    files = git(checkout, "ls-tree", "-r", "--name-only", "HEAD", *ROOTS[name]).split()
    found = {
        file: named_tests(git(checkout, "show", f"HEAD:{file}"))
        for file in files
        if file.endswith(".py")
    }
    return Pinned(commit, date, {file: tests for file, tests in found.items() if tests})


def git(checkout: Path, *command: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), *command],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.rstrip("\n")


def changes(before: dict[str, Pinned], after: dict[str, Pinned]) -> list[str]:
    """A line for each test that came or went."""
    old, new = (
        {f"{name} {test}" for name, pinned in side.items() for test in pinned.ids()}
        for side in (before, after)
    )
    return [f"+ {test}" for test in sorted(new - old)] + [
        f"- {test}" for test in sorted(old - new)
    ]


if __name__ == "__main__":
    sys.exit(main())
