"""Config files of every family, mutated at random: what is computed, here and there.

    PYTHONPATH=tests:tests/bridge python benchmarks/config_fuzz.py [--cases 1000]
    PYTHONPATH=tests:tests/bridge python benchmarks/config_fuzz.py \
        --families jamba,llama4_text --out FILE
    PYTHONPATH=tests:tests/bridge python benchmarks/config_fuzz.py --case '{...}'

Each case is drawn by its number, as its seed. A tiny model is made of the config by
transformers and by bridge: the logits must agree, or bridge must refuse the config.
A run goes on where the JSON beside it ends, and ends with 1 if a case differs; each is
printed with the option that replays it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import jax
import result
import torch
import transformers
from composition.config_cases import ConfigCase, case_of_seed
from composition.config_oracle import KINDS, TOLERANCE, Outcome, outcome_of

PACKAGES = ("jax", "flax", "torch", "transformers")
_EVERY = 20  # cases between two writes of the results


def main() -> int:
    """Runs the cases that are not in the results yet."""
    options = _parse()
    _settle()
    if options.case is not None:
        case = ConfigCase.from_json(options.case)
        return _say(case, outcome_of(case))
    conditions = result.begin(options, PACKAGES)
    found = _read(options)
    started = time.perf_counter()
    before = found["seconds"]
    for seed in range(found["cases"], options.cases):
        case = case_of_seed(seed, options.families)
        _add(found, seed, case, outcome_of(case))
        if (seed + 1) % _EVERY == 0 or seed + 1 == options.cases:
            found["seconds"] = round(before + time.perf_counter() - started)
            result.write(options, conditions, found, show=False)
    print({name: found[name] for name in ("cases", "seconds", *KINDS)})
    return int(bool(found["mismatches"]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compares mutated config files with transformers."
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument(
        "--families",
        type=lambda names: tuple(names.split(",")),
        default=(),
        help="values of model_type to draw from; all by default",
    )
    parser.add_argument("--case", help="one case, as a failure prints it")
    result.add_arguments(parser)
    parser.set_defaults(out=result.RESULTS / "config_fuzz.json")
    return parser.parse_args()


def _settle() -> None:
    """Compiles with few optimizations, and silences progress bars and advice."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)
    silence()


def silence() -> None:
    """Has torch take one thread, and transformers say nothing."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _read(options: argparse.Namespace) -> dict[str, Any]:
    empty = {
        "cases": 0,
        "seconds": 0,
        **dict.fromkeys(KINDS, 0),
        "tolerance": TOLERANCE,
        "largest_error_of_those_that_agree": 0.0,
        "mismatches": [],
    }
    return result.resumed(options, empty)


def _add(found: dict[str, Any], seed: int, case: ConfigCase, outcome: Outcome) -> None:
    found["cases"] = seed + 1
    found[outcome.kind] += 1
    if outcome.kind == "agree":
        name = "largest_error_of_those_that_agree"
        found[name] = max(found[name], outcome.error)
    if outcome.kind == "differ":
        _say(case, outcome)
        mismatch: Mapping[str, Any] = {"seed": seed, "error": outcome.error}
        found["mismatches"].append({**mismatch, "case": case.to_json()})


def _say(case: ConfigCase, outcome: Outcome) -> int:
    print(f"{outcome.kind}: {outcome.error:.1e} {outcome.says}", flush=True)
    print(f"replay: config_fuzz.py --case '{case.to_json()}'", flush=True)
    return int(outcome.kind == "differ")


if __name__ == "__main__":
    raise SystemExit(main())
