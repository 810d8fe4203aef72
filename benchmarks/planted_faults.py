"""In how many cases compositions and mutated configs find faults that are planted.

    PYTHONPATH=tests:tests/bridge python benchmarks/planted_faults.py [--cases 300]
    PYTHONPATH=tests:tests/bridge python benchmarks/planted_faults.py --only 'NAME'

Cases are drawn by their numbers, as `composition_fuzz.py` and `config_fuzz.py` do; of
configs, those of the family that the fault is in. A composition is run on one device
once, and on a mesh with each fault that is not found yet. A fault is found by a case
whose numbers differ, or that is refused where it is not without the fault. A run goes
on where the JSON beside it ends, and ends with 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import composition_fuzz
import config_fuzz
import jax
import result
from composition import config_cases, config_oracle
from composition.composed_on_one_device import run_plainly
from composition.composition_draw import case_of_seed
from composition.composition_oracle import Outcome, outcome_against
from composition.compositions import Composition
from composition.planted import PLANTED, Fault, planted
from composition.planted_configs import PLANTED_CONFIGS, PlantedConfig
from tiny_configs import VARIANTS

PACKAGES = ("jax", "flax", "optax", "equinox", "torch", "transformers")


def main() -> int:
    """Looks for the faults that the results do not name yet."""
    options = _parse()
    composition_fuzz.settle()
    config_fuzz.silence()
    conditions = result.begin(options, PACKAGES)
    found = result.resumed(options, _EMPTY)
    names = [options.only] if options.only else [*PLANTED_CONFIGS, *PLANTED]

    def write() -> None:
        result.write(options, conditions, found, show=False)

    for name in PLANTED_CONFIGS:
        if name in names and name not in found["found"]:
            _search_configs(found, name, options.cases)
            write()
    sought = [n for n in PLANTED if n in names and n not in found["found"]]
    for seed in range(found["compositions"], options.cases):
        if not sought:
            break
        started = time.process_time()
        for name in _found_by(case_of_seed(seed), sought):
            found["found"][name] = seed + 1
            sought.remove(name)
        found["compositions"] = 0 if options.only else seed + 1
        found["cpu_seconds"] += round(time.process_time() - started, 1)
        write()
    print(found)
    return int(any(name not in found["found"] for name in names))


_EMPTY: dict[str, Any] = {"compositions": 0, "cpu_seconds": 0, "found": {}}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Counts the cases until planted faults are found."
    )
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--only", choices=[*PLANTED_CONFIGS, *PLANTED])
    result.add_arguments(parser)
    parser.set_defaults(out=result.RESULTS / "planted_faults.json")
    return parser.parse_args()


def _found_by(case: Composition, names: list[str]) -> list[str]:
    """Returns the faults with which the case does not come out as without them."""
    with jax.enable_x64(True):
        want = run_plainly(case)
        without = outcome_against(case, want).kind
        found = []
        for name in names:
            jax.clear_caches()  # What was traced without the fault would be run again.
            kind = _kind(case, want, PLANTED[name])
            print(f"{name!r} {kind}, {without} without", flush=True)
            if kind != without:
                found.append(name)
    return found


def _kind(case: Composition, want: Any, fault: Fault) -> str:
    with planted(fault):
        try:
            outcome: Outcome = outcome_against(case, want)
        except Exception:  # a crash is seen, too
            return "differ"
    return outcome.kind


def _search_configs(found: dict[str, Any], name: str, cases: int) -> None:
    planted_config = PLANTED_CONFIGS[name]
    for seed, case in enumerate(_cases_of(planted_config, cases)):
        with planted(planted_config.fault):
            kind = config_oracle.outcome_of(case).kind
        if kind == "differ":
            found["found"][name] = seed + 1
            print(f"{name!r} is found by config {seed + 1}: {case.to_json()}")
            return


def _cases_of(planted_config: PlantedConfig, cases: int) -> Any:
    """Draws configs of one family, each field of it once, and then again."""
    model_type = planted_config.model_type
    own = [v for v in VARIANTS if VARIANTS[v]["model_type"] == model_type]
    pairs = config_cases.field_pairs(own)
    random.Random(0).shuffle(pairs)
    for seed in range(cases):
        pair = pairs[seed % len(pairs)]
        yield config_cases.draw_case(random.Random(seed).choice, own, [pair])


if __name__ == "__main__":
    raise SystemExit(main())
