"""In how many cases compositions and mutated configs find faults that are planted.

    PYTHONPATH=tests:tests/bridge python benchmarks/planted_faults.py [--cases 300]
    PYTHONPATH=tests:tests/bridge python benchmarks/planted_faults.py \
        --only 'NAME' ... --seeds 14 ...

Cases are drawn by their numbers, as `composition_fuzz.py` and `config_fuzz.py` do; of
configs, those of the family that the fault is in. A composition is run on one device
once, and on a mesh with each fault that is not found yet and whose functions it calls.
A fault is found by a case whose numbers differ, or that is refused though it is not
without the fault, or the other way round. `found` has the number of a case that finds
it: with `--seeds`, which looks where a fault is likely to be seen, that is a bound, and
else the first. A run goes on where the JSON beside it ends, and ends with 1 if a fault
is not found.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
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
from composition.planted import PLANTED, Fault, planted, watched
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
    names = options.only or [*PLANTED_CONFIGS, *PLANTED]

    def write() -> None:
        result.write(options, conditions, found, show=False)

    _search_configs(found, names, options.cases, write)
    _search_compositions(found, names, options, write)
    print(found)
    return int(any(name not in found["found"] for name in names))


_EMPTY: dict[str, Any] = {"compositions": 0, "cpu_seconds": 0, "found": {}}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Counts the cases until planted faults are found."
    )
    parser.add_argument("--cases", type=int, default=300)
    faults = [*PLANTED_CONFIGS, *PLANTED]
    parser.add_argument("--only", nargs="+", choices=faults, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, help="of compositions")
    result.add_arguments(parser)
    parser.set_defaults(out=result.RESULTS / "planted_faults.json")
    return parser.parse_args()


def _found_by(case: Composition, names: list[str]) -> list[str]:
    """Returns the faults with which the case does not come out as without them."""
    sought = {name: PLANTED[name] for name in names}
    with jax.enable_x64(True):
        want = run_plainly(case)
        jax.clear_caches()
        with watched(sought) as called:
            without = outcome_against(case, want).kind
        found = []
        for name in [name for name in names if name in called]:
            jax.clear_caches()  # What was traced without the fault would be run again.
            kind = _kind(case, want, PLANTED[name])
            if kind != without:
                print(f"{name!r}: {kind}, and {without} without it", flush=True)
                found.append(name)
    return found


def _kind(case: Composition, want: Any, fault: Fault) -> str:
    with planted(fault):
        try:
            outcome: Outcome = outcome_against(case, want)
        except Exception:  # a crash is seen, too
            return "differ"
    return outcome.kind


def _search_compositions(
    found: dict[str, Any],
    names: list[str],
    options: argparse.Namespace,
    write: Callable[[], None],
) -> None:
    sought = [n for n in PLANTED if n in names and n not in found["found"]]
    is_whole = not (options.only or options.seeds)
    first = found["compositions"] if is_whole else 0
    for seed in options.seeds or range(first, options.cases):
        if not sought:
            return
        started = time.process_time()
        for name in _found_by(case_of_seed(seed), sought):
            found["found"][name] = seed + 1
            sought.remove(name)
        if is_whole:
            found["compositions"] = seed + 1
        found["cpu_seconds"] += round(time.process_time() - started, 1)
        write()


def _search_configs(
    found: dict[str, Any], names: list[str], cases: int, write: Callable[[], None]
) -> None:
    for name in PLANTED_CONFIGS:
        if name in names and name not in found["found"]:
            number = _found_by_config(PLANTED_CONFIGS[name], cases)
            found["found"] |= {} if number is None else {name: number}
            write()


def _found_by_config(planted_config: PlantedConfig, cases: int) -> int | None:
    """Returns the number of configs until one shows the fault; None if none does."""
    for seed, case in enumerate(_cases_of(planted_config, cases)):
        with planted(planted_config.fault):
            kind = config_oracle.outcome_of(case).kind
        if kind == "refused" and config_oracle.outcome_of(case).kind != kind:
            kind = "differ"
        if kind == "differ":
            print(f"found by config {seed + 1}: {case.to_json()}", flush=True)
            return seed + 1
    return None


def _cases_of(
    planted_config: PlantedConfig, cases: int
) -> Iterator[config_cases.ConfigCase]:
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
