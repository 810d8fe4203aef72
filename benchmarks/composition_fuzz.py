"""Models, plans and runs put together at random: on a mesh, and on one device.

    PYTHONPATH=tests python benchmarks/composition_fuzz.py [--cases 2000]
    PYTHONPATH=tests python benchmarks/composition_fuzz.py --case '{...}'
    PYTHONPATH=tests python benchmarks/composition_fuzz.py --planted 'NAME'

Each case is drawn by its number, as its seed. Loss, gradients and three steps must be
those of one device, or the case is refused by a ValueError. A run goes on where the
JSON beside it ends, and ends with 1 if a case differs; each is printed with the option
that replays it. `--planted` puts a fault into the library, and says after how many
cases it is found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import Any

import jax
import result
from composition.composition_oracle import KINDS, TOLERANCES, Outcome, outcome_of
from composition.compositions import Composition, case_of_seed
from composition.planted import PLANTED, planted

PACKAGES = ("jax", "flax", "optax", "equinox")


def main() -> int:
    """Runs the cases that are not in the results yet."""
    options = _parse()
    _settle()
    if options.planted is not None:
        return _search(options)
    if options.case is not None:
        case = Composition.from_json(options.case)
        return _say(case, _outcome(case))
    conditions = result.begin(options, PACKAGES)
    found = _read(options)
    started, before = time.process_time(), found["cpu_seconds"]
    for seed in range(found["cases"], options.cases):
        case = case_of_seed(seed)
        _add(found, seed, case, _outcome(case))
        found["cpu_seconds"] = round(before + time.process_time() - started)
        result.write(options, conditions, found, show=False)
        jax.clear_caches()
    print({name: found[name] for name in ("cases", "cpu_seconds", *KINDS)})
    return int(bool(found["mismatches"]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compares compositions on a mesh with one device."
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--case", help="one case, as a failure prints it")
    parser.add_argument("--planted", choices=PLANTED, help="a fault to be found")
    result.add_arguments(parser)
    parser.set_defaults(out=result.RESULTS / "composition_fuzz.json")
    return parser.parse_args()


def _settle() -> None:
    """Eight simulated devices, and programs compiled with few optimizations."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_numpy_rank_promotion", "raise")


def _outcome(case: Composition) -> Outcome:
    """The outcome; an exception that is no refusal counts as a difference."""
    try:
        return outcome_of(case)
    except Exception as error:  # a crash is a case to be seen, too
        return Outcome("differ", float("inf"), f"{type(error).__name__}: {error}"[:500])


def _search(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        stack.enter_context(planted(options.planted))
        for seed in range(options.cases):
            case = case_of_seed(seed)
            if (outcome := _outcome(case)).kind == "differ":
                print(f"{options.planted!r} is found by case {seed + 1}:", flush=True)
                _say(case, outcome)
                return 0
    print(f"{options.planted!r} is not found in {options.cases} cases")
    return 1


def _read(options: argparse.Namespace) -> dict[str, Any]:
    """What was found so far, without what the file says of its conditions."""
    if options.out.is_file():
        found = json.loads(options.out.read_text())
        return {name: found[name] for name in found if name not in result.FIELDS}
    return {
        "cases": 0,
        "cpu_seconds": 0,
        **dict.fromkeys(KINDS, 0),
        "tolerances": TOLERANCES,
        "largest_error_in_float64": 0.0,
        "refusals": [],
        "mismatches": [],
    }


def _add(found: dict[str, Any], seed: int, case: Composition, outcome: Outcome) -> None:
    found["cases"] = seed + 1
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
