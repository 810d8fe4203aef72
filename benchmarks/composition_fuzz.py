"""Models, plans and runs put together at random: on a mesh, and on one device.

    PYTHONPATH=tests python benchmarks/composition_fuzz.py [--cases 2000] [--jobs 2]
    PYTHONPATH=tests python benchmarks/composition_fuzz.py --case '{...}'

Each case is drawn by its number, as its seed. Loss, gradients and three steps must be
those of one device, or the case is refused by a ValueError. A run tries those again
that differed, goes on where the JSON beside it ends, and ends with 1 if a case differs;
each is printed with the option that replays it.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import jax
import result
from composition.composition_draw import case_of_seed
from composition.composition_oracle import KINDS, TOLERANCES, Outcome, outcome_of
from composition.compositions import Composition
from helpers import compiling

PACKAGES = ("jax", "flax", "optax", "equinox")
_MOST_OF_A_PROCESS = 100  # cases, for what jax keeps of each
_PATIENCE = 600  # seconds for a case

_IN_TURN = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


class Timed(NamedTuple):
    """What came of a case, its CPU-seconds, and whether its collectives took turns."""

    outcome: Outcome
    cpu_seconds: float
    in_turn: bool = False


def main() -> int:
    """Runs the cases that are not in the results yet."""
    options = _parse()
    settle()
    if options.case is not None:
        case = Composition.from_json(options.case)
        return _say(case, _outcome(case))
    conditions = result.begin(options, PACKAGES)
    found = _read(options)
    again = [mismatch["seed"] for mismatch in found["mismatches"]]
    found |= {"mismatches": [], "differ": 0}
    seeds = [*again, *range(found["cases"], options.cases)]
    for seed, timed in _outcomes(seeds, options.jobs):
        _add(found, seed, case_of_seed(seed), timed.outcome)
        found["in_turn"] += [seed] * timed.in_turn
        found["cpu_seconds"] = round(found["cpu_seconds"] + timed.cpu_seconds, 1)
        result.write(options, conditions, found, show=False)
    print({name: found[name] for name in ("cases", "cpu_seconds", *KINDS)})
    return int(bool(found["mismatches"]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compares compositions on a mesh with one device."
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--case", help="one case, as a failure prints it")
    result.add_arguments(parser)
    parser.set_defaults(out=result.RESULTS / "composition_fuzz.json")
    return parser.parse_args()


def settle(*flags: str) -> None:
    """Eight simulated devices, and programs compiled as in the tests, in one part."""
    flags = (os.environ.get("XLA_FLAGS", ""), *flags)
    os.environ["XLA_FLAGS"] = " ".join(
        [*flags, "--xla_cpu_parallel_codegen_split_count=1"]
    )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    compiling.enable()
    jax.config.update("jax_numpy_rank_promotion", "raise")


def _outcomes(seeds: Sequence[int], jobs: int) -> Iterator[tuple[int, Timed]]:
    """Yields the outcomes of cases, in order, and their CPU-seconds.

    A case that ends its process, as one that hangs does, is tried alone, then with one
    collective at a time, since simulated devices may wait for threads when they run two
    (jax 0.10); if it ends that too, it differs.
    """
    left = list(seeds)
    while left:
        # A pool ends with its cases, since one whose processes are replaced
        # (max_tasks_per_child) may wait for ever in Python 3.11.
        now = left[: _MOST_OF_A_PROCESS * jobs]
        with _pool(min(jobs, len(now))) as pool:
            futures = [pool.submit(_timed, seed) for seed in now]
            for future in futures:
                try:
                    timed = future.result()
                except BrokenProcessPool:
                    break
                yield left.pop(0), timed
            else:
                continue
        # It, or one that ran beside it, has ended the process.
        seed = left.pop(0)
        yield seed, _alone(seed)


def _alone(seed: int) -> Timed:
    for flags in ((), (_IN_TURN,)):
        with _pool(1, *flags) as pool:
            try:
                timed = pool.submit(_timed, seed).result()
                return timed._replace(in_turn=bool(flags))
            except BrokenProcessPool:
                continue
    return Timed(Outcome("differ", float("inf"), "it ended its process"), 0.0)


def _pool(jobs: int, *flags: str) -> ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, spawn, initializer=settle, initargs=flags)


def _timed(seed: int) -> Timed:
    """A case that hangs shows where, and ends the run."""
    started = time.process_time()
    faulthandler.dump_traceback_later(_PATIENCE, exit=True)
    outcome = _outcome(case_of_seed(seed))
    faulthandler.cancel_dump_traceback_later()
    jax.clear_caches()
    return Timed(outcome, time.process_time() - started)


def _outcome(case: Composition) -> Outcome:
    """The outcome; an exception that is no refusal counts as a difference."""
    try:
        return outcome_of(case)
    except Exception as error:  # a crash is a case to be seen, too
        return Outcome("differ", float("inf"), f"{type(error).__name__}: {error}"[:500])


def _read(options: argparse.Namespace) -> dict[str, Any]:
    empty = {
        "cases": 0,
        "cpu_seconds": 0,
        **dict.fromkeys(KINDS, 0),
        "tolerances": TOLERANCES,
        "largest_error_in_float64": 0.0,
        "refusals": [],
        "mismatches": [],
        "in_turn": [],  # cases that ended their process until collectives took turns
    }
    return result.resumed(options, empty)


def _add(found: dict[str, Any], seed: int, case: Composition, outcome: Outcome) -> None:
    found["cases"] = max(found["cases"], seed + 1)
    found[outcome.kind] += 1
    if outcome.kind == "agree" and case.policy == "none":
        name = "largest_error_in_float64"
        found[name] = max(found[name], outcome.error)
    if outcome.kind == "refused":
        found["refusals"].append({"seed": seed, "says": outcome.says[:200]})
    if outcome.kind == "differ":
        _say(case, outcome)
        mismatch = {"seed": seed, "error": str(outcome.error), "says": outcome.says}
        found["mismatches"].append({**mismatch, "case": case.to_json()})


def _say(case: Composition, outcome: Outcome) -> int:
    print(f"{outcome.kind}: {outcome.error:.1e} {outcome.says}", flush=True)
    print(f"replay: composition_fuzz.py --case '{case.to_json()}'", flush=True)
    return int(outcome.kind == "differ")


if __name__ == "__main__":
    raise SystemExit(main())
