"""Do the tests notice? Mutants of the code, each run against the tests that cover it.

    export PYTHONPATH=tests
    python benchmarks/mutants.py cover       # once: which tests run which lines
    python benchmarks/mutants.py run [--count 60] [--seconds 3000]
    python benchmarks/mutants.py run --against COMMIT    # survivors, by its tests

`cover` runs `make test-all`'s tests under coverage.py with a context a test. `run`
plants one mutant after the other in a copy of the tree (a comparison turned, a
reduction dropped, an axis swapped, a number off by one, a dtype exchanged, a condition
negated), spread over all packages by seed, and runs the tests that cover its line,
cheapest first, until one fails: those of the default tier, then, if none did, the rest.
What is known is kept in the JSON, so that a run that was stopped goes on. With
`--against` the mutants that survived are judged once more, in the tree of that commit
and by its tests: what these notice, the tests of today have lost.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import itertools
import json
import os
import queue
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest
import result
from helpers import tiers

ROOT = result.ROOT
COVERAGE = ROOT / "build" / "coverage"
PACKAGES = ("fsdp_jax", "bridge")
PHASES = ("setup", "run", "teardown")
MOST = 600.0
"""CPU-seconds of tests that a mutant is shown to; the JSON counts those left out."""
PATIENCE = 120.0, 4.0
"""Seconds, and how many times what the tests are known to take, after which they are
stopped: the mutant hangs, so it is noticed."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one expression.

    Attributes:
      file: Path of the source from the root.
      line: Line of the expression, from 1.
      index: Which of the file's candidates, in the order of `ast.walk`.
      before: The expression.
      after: What takes its place.
    """

    file: str
    line: int
    index: int
    before: str
    after: str


COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
REDUCTIONS = {"psum", "pmean", "pmax", "psum_scatter", "sum", "max", "min", "mean"}
NAMES = {
    "float32": "bfloat16",
    "bfloat16": "float32",
    "int32": "int16",
    "dp_shard": "dp_outer",
    "dp_outer": "dp_shard",
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
}


def mutations(node: ast.AST) -> Iterator[ast.AST]:
    """What may take the place of an expression."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            new = copy.deepcopy(node)
            new.ops = [COMPARISONS[type(op)]()]
            yield new
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            new = copy.deepcopy(node)
            new.op = OPERATORS[type(op)]()
            yield new
        case ast.BoolOp(op=op):
            new = copy.deepcopy(node)
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield new
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            yield ast.IfExp(node.test, orelse, body)
        case ast.Call(func=func, args=[first, *_]) if _last(func) in REDUCTIONS:
            yield first
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Attribute(attr=name) if name in NAMES:
            new = copy.deepcopy(node)
            new.attr = NAMES[name]
            yield new
        case ast.Constant(value=str() as value) if value in NAMES:
            yield ast.Constant(NAMES[value])


def _last(func: ast.AST) -> str:
    return getattr(func, "attr", getattr(func, "id", ""))


def candidates(file: str, text: str) -> Iterator[tuple[Mutant, ast.AST, ast.AST]]:
    """The mutants of a source, each with the expression and its replacement."""
    tree = ast.parse(text)
    skipped = {id(n) for node in ast.walk(tree) for n in _not_run(node)}
    index = 0
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for new in mutations(node):
            before, after = ast.unparse(node), ast.unparse(new)
            yield Mutant(file, node.lineno, index, before, after), node, new
            index += 1


def _not_run(node: ast.AST) -> Iterator[ast.AST]:
    """Annotations, decorators and what makes the text of an error: no behaviour."""
    parts: list[ast.AST | None] = []
    match node:
        case ast.FunctionDef(args=args, returns=returns, decorator_list=decorators):
            every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
            parts = [returns, *decorators, *(a.annotation for a in every)]
        case ast.AnnAssign(annotation=annotation):
            parts = [annotation]
        case ast.Raise() | ast.JoinedStr() | ast.Assert():
            parts = [node]
    for part in parts:
        if part is not None:
            yield from ast.walk(part)


def planted(text: str, mutant: Mutant) -> str:
    """The source with the mutant in it; nothing else moves."""
    for found, node, new in candidates(mutant.file, text):
        if found.index == mutant.index:
            return _replaced(text, node, ast.unparse(new))
    raise ValueError(f"{mutant.file} has no candidate {mutant.index}.")


def counterpart(mutant: Mutant, source: Path) -> Mutant | None:
    """The same change in another version of the file; None if it has not such a place.

    Of several equal expressions the one on the nearest line.
    """
    if not source.exists():
        return None
    same = [
        found
        for found, _, _ in candidates(mutant.file, source.read_text())
        if (found.before, found.after) == (mutant.before, mutant.after)
    ]
    return min(same, key=lambda found: abs(found.line - mutant.line), default=None)


def _replaced(text: str, node: ast.AST, new: str) -> str:
    lines = text.encode().splitlines(keepends=True)  # columns count bytes
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    data = b"".join(lines)
    return (data[:start] + f"({new})".encode() + data[end:]).decode()


def chosen(count: int, seed: int, covered: dict[str, dict[int, set[str]]]):
    """Mutants on covered lines, as many from each folder as its share allows."""
    folders: dict[str, list[Mutant]] = {}
    for file in sorted(covered):
        text = (ROOT / file).read_text()
        for mutant, _, _ in candidates(file, text):
            if covered[file].get(mutant.line):
                folders.setdefault(str(Path(file).parent), []).append(mutant)
    rng = random.Random(seed)
    pools = [rng.sample(pool, len(pool)) for _, pool in sorted(folders.items())]
    turns = [pool[turn] for turn in range(count) for pool in pools if turn < len(pool)]
    return turns[:count]


def cover() -> None:
    """Runs the tests once, and keeps which of them run which lines."""
    shutil.rmtree(COVERAGE, ignore_errors=True)
    COVERAGE.mkdir(parents=True)
    config = COVERAGE / "coveragerc"
    config.write_text(
        f"[run]\nsource_pkgs = {', '.join(PACKAGES)}\nparallel = true\n"
        f"data_file = {COVERAGE / 'data'}\n"
    )
    words = f"-n {os.cpu_count()} --dist loadfile --no-loadscope-reorder".split()
    words += ["-m", "not long"]
    words += ["--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report="]
    subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=True)


def covering() -> dict[str, dict[int, set[str]]]:
    """File -> line -> the tests that run it, from what `cover` kept."""
    from coverage.numbits import numbits_to_nums

    found: dict[str, dict[int, set[str]]] = {}
    with sqlite3.connect(COVERAGE / "data") as data:
        rows = data.execute(
            "select path, context, numbits from line_bits "
            "join file on file.id = file_id join context on context.id = context_id"
        )
        for path, context, numbits in rows:
            test, _, phase = context.rpartition("|")
            if phase in PHASES:
                lines = found.setdefault(str(Path(path).relative_to(ROOT)), {})
                for line in numbits_to_nums(numbits):
                    lines.setdefault(line, set()).add(test)
    return found


def noticed(tree: Path, tests: Sequence[str], seconds: float) -> bool:
    """Whether one of the tests fails, or they never end.

    Args:
      tree: Where the mutant is planted.
      tests: Node ids, in the order in which they run.
      seconds: What they take.
    """
    words = ["-x", "-q", "-m", "not long", "-p", "no:cacheprovider"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(tests))
        listed.flush()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *words, f"@{listed.name}"],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
                capture_output=True,
                text=True,
                timeout=PATIENCE[0] + PATIENCE[1] * seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        return False  # All of them are long.
    # 4: a file cannot be collected any more, so its tests are not found.
    if done.returncode not in (0, 1, 2, 4):
        raise RuntimeError(
            f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}"
        )
    return done.returncode != 0


def judge(mutant: Mutant, tests: set[str], tree: Path) -> dict:
    """Plants a mutant and runs the tests that cover it, by tier and cost."""
    durations = tiers.read_durations()
    default = tiers.default_tier(durations)
    costs = {test: durations.get(test, tiers.UNMEASURED) for test in tests}
    ordered = sorted(tests, key=lambda test: (costs[test], test))
    first = [test for test in ordered if test in default or test not in durations]
    rest = [test for test in ordered if test not in default and test in durations]
    totals = itertools.accumulate(costs[test] for test in rest)
    rest = [test for test, total in zip(rest, totals, strict=True) if total <= MOST]
    path, start = tree / mutant.file, time.monotonic()
    text = path.read_text()
    path.write_text(planted(text, mutant))
    try:
        by_default, by_all = False, False
        if first:
            by_default = noticed(tree, first, sum(costs[test] for test in first))
        if rest and not by_default:
            by_all = noticed(tree, rest, sum(costs[test] for test in rest))
    finally:
        path.write_text(text)
    seconds = round(time.monotonic() - start, 1)
    not_shown = 0 if by_default or by_all else len(tests) - len(first) - len(rest)
    found = {"default": by_default, "all": by_default or by_all, "not_shown": not_shown}
    return {"tests": len(tests), "seconds": seconds, **found}


def run(args: argparse.Namespace) -> None:
    """Judges mutants until all are, or the time is over."""
    conditions = result.begin(args, ("jax", "pytest", "coverage"))
    covered = covering()
    known = result.resumed(args, {"mutants": []})["mutants"]
    by_place = {(row["file"], row["index"]): row for row in known}
    wanted = [
        mutant
        for mutant in chosen(args.count, args.seed, covered)
        if _is_wanted(by_place.get((mutant.file, mutant.index)), args.against)
    ]
    end = time.monotonic() + args.seconds
    for mutant, verdict in _judged(wanted, covered, args, end):
        if args.against:
            row = by_place[mutant.file, mutant.index]
            row["noticed_before"] = verdict["all"]
        else:
            known.append(dataclasses.asdict(mutant) | verdict)
            print(json.dumps(known[-1]), file=sys.stderr, flush=True)
        result.write(args, conditions, summary(known, args.seed), show=False)


def _is_wanted(row: dict | None, against: str | None) -> bool:
    """New mutants, or with `against` those that survived and were not judged there."""
    if not against:
        return row is None
    return row is not None and not row["all"] and "noticed_before" not in row


def _judged(
    wanted: Sequence[Mutant],
    covered: Mapping[str, Mapping[int, set[str]]],
    args: argparse.Namespace,
    end: float,
) -> Iterator[tuple[Mutant, dict]]:
    """Each mutant with what became of it, as they are done; none begins after `end`."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def judge_one(mutant: Mutant) -> dict | None:
        if time.monotonic() > end:
            return None
        tree = free.get()
        tests = covered[mutant.file][mutant.line]
        present = {test for test in tests if (tree / test.split("::")[0]).exists()}
        try:
            there = counterpart(mutant, tree / mutant.file)
            if there is None:  # That commit has no such code.
                return {"tests": 0, "default": False, "all": False}
            return judge(there, present, tree)
        finally:
            free.put(tree)

    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        for number in range(args.jobs):
            free.put(cloned(Path(scratch, str(number)), args.against or "HEAD"))
        futures = {pool.submit(judge_one, mutant): mutant for mutant in wanted}
        for future in as_completed(futures):
            if (verdict := future.result()) is not None:
                yield futures[future], verdict


def cloned(tree: Path, commit: str) -> Path:
    """A copy of the repository to plant mutants in."""
    subprocess.run(["git", "clone", "-q", ROOT, tree], check=True)
    subprocess.run(["git", "checkout", "-q", commit], cwd=tree, check=True)
    return tree


def summary(known: list[dict], seed: int) -> dict:
    killed = [row for row in known if row["all"]]
    return {
        "seed": seed,
        "judged": len(known),
        "noticed": len(killed),
        "lost": [row for row in known if row.get("noticed_before")],
        "noticed_by_default": sum(row["default"] for row in killed),
        "mutants": known,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("cover", "run"))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--against", metavar="COMMIT", help="judge survivors by its tests"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--seconds", type=float, default=3000, help="begin none after")
    result.add_arguments(parser)
    parser.set_defaults(out=result.RESULTS / "mutants.json")
    args = parser.parse_args()
    cover() if args.what == "cover" else run(args)


if __name__ == "__main__":
    main()
