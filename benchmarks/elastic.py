"""Processes of an elastic job killed in steps, saves and loads: what is lost, how long.

    PYTHONPATH=tests python benchmarks/elastic.py [--kills 50] [--out FILE]
    PYTHONPATH=tests python benchmarks/elastic.py --victims "two at once" "rank 0"

A run of `examples/elastic_replicas.py` has 4 processes of 2 simulated devices, and
saves each step on the local disk. In each run a random process is killed at a random
moment of a step, of a save and of a load, and in every third run the job grows back to
4 replicas; then it goes on to its end. `steps_lost` counts steps between the newest
that was complete on the disks at a kill and the one that the next generation went on
from; `largest_difference` is that of a loss to an uninterrupted run's, relative.
`seconds` are from a kill to the end of the first step after it, with compiled programs
in jax's persistent cache. A run in which gloo waited too long, as on a busy machine, is
discarded and counted. Each other run that does not come to its last step is one of
`wrong_ends`, and all that it wrote is in `wrong_end_outputs`. The benchmark goes on
where the JSON beside it ends.

With `--victims` other processes are killed: two at once, or rank 0, which has jax's
service and writes the losses. Each run has a kill in a step or a save, grows back to 4
replicas, and has another one while these load.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import result
from helpers.elastic import PROCESSES, VICTIMS, Death, ElasticRun

from fsdp_jax.launch import ElasticConfig

STEPS, KILLS_A_RUN, GROWS_EVERY = 24, 3, 3
# The first kill has nothing to load.
ORDERS = (
    ("step", "save", "load"),
    ("save", "load", "step"),
    ("step", "load", "save"),
    ("save", "step", "load"),
)
_EMPTY: dict[str, Any] = {
    "next": 0,
    "discarded": [],
    "uninterrupted": [],
    "kills": [],
    "growths": [],
    "wrong_ends": 0,
    "wrong_end_outputs": [],
}
_GLOO_TIMEOUT = re.compile(r".*gloo.*(timed out|timeout).*", re.IGNORECASE)


def main() -> None:
    """Kills processes, run after run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="at least, of a kind")
    parser.add_argument("--victims", nargs="+", default=["one"], choices=VICTIMS)
    result.add_arguments(parser)
    args = parser.parse_args()
    conditions = result.begin(args, ("jax", "jaxlib"))
    found = copy.deepcopy(_EMPTY)
    if args.out:
        found |= result.resumed(args, _EMPTY)
    if not found["uninterrupted"]:
        found["uninterrupted"] = uninterrupted()
    warm_up()
    while victims := next(missing(found, args.victims, args.kills), None):
        number, found["next"] = found["next"], found["next"] + 1
        try:
            if victims == "one":
                interrupted(found, number)
            else:
                interrupted_twice(found, number, victims)
        except AssertionError as error:
            count_failed(found, number, str(error))
        result.write(args, conditions, found | summary(found), show=False)
    result.write(args, conditions, found | summary(found))


def missing(found: dict[str, Any], kinds: list[str], kills: int) -> Iterator[str]:
    """Yields the kinds of victims of which there were fewer kills."""
    done = Counter(kill.get("victims", "one") for kill in found["kills"])
    yield from (kind for kind in kinds if done[kind] < kills)


def uninterrupted() -> list[float]:
    """Returns the loss of each step of a run that nothing happens to."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ElasticRun(Path(folder), STEPS) as run,
    ):
        assert run.wait() == 0, run.said
        return [loss for _, loss in run.losses()]


def warm_up() -> None:
    """Compiles what generations of 2 and 1 replicas run."""
    config = ElasticConfig(1, 4, rejoin_secs=float("inf"))
    with (
        tempfile.TemporaryDirectory() as folder,
        ElasticRun(Path(folder), STEPS, config) as run,
    ):
        for _ in range(3):
            run.await_step_after(
                run.kill("step", after_step=1, chance=random.Random(0))
            )


def interrupted(found: dict[str, Any], number: int) -> None:
    """Runs once with three kills, and adds what came of them.

    Raises:
      AssertionError: If the job did not come to its last step, with all its output.
    """
    chance = random.Random(number)
    limits = ElasticConfig(1, 4, rejoin_secs=float("inf"), max_restarts=KILLS_A_RUN)
    kills, growths = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        ElasticRun(Path(folder), STEPS, limits) as run,
    ):
        deaths: list[Death] = []
        order = ORDERS[number % len(ORDERS)]
        for moment, following in itertools.zip_longest(order, order[1:]):
            after = run.last_step() + chance.randint(1, 2) if moment != "load" else 0
            deaths.append(run.kill(moment, after_step=after, chance=chance))
            if following == "load":
                continue  # The next kill comes before a step.
            kills += [_told(run, x, is_last=x is deaths[-1]) for x in deaths]
            deaths = []
        if number % GROWS_EVERY == 0:
            growths.append(grow(run))
        largest = _largest_difference(run, found["uninterrupted"])
    found["kills"] += [kill | {"run": number, "difference": largest} for kill in kills]
    found["growths"] += growths


def interrupted_twice(found: dict[str, Any], number: int, victims: str) -> None:
    """Runs once with a kill in a step or save, and one while the grown job loads.

    Raises:
      AssertionError: If the job did not come to its last step, with all its output.
    """
    chance = random.Random(number)
    limits = ElasticConfig(1, PROCESSES, rejoin_secs=float("inf"), max_restarts=2)
    with (
        tempfile.TemporaryDirectory() as folder,
        ElasticRun(Path(folder), STEPS, limits) as run,
    ):
        moment, after = ("step", "save")[number % 2], chance.randint(2, 6)
        kills = [
            _told(
                run,
                run.kill(moment, after_step=after, chance=chance, victims=victims),
                is_last=True,
            )
        ]
        generation = run.generation()
        run.job.grow()
        run.await_that(lambda: run.generation() > generation)
        run.await_that(lambda: len(run.pids()) == PROCESSES)
        death = run.kill("load", after_step=0, chance=chance, victims=victims)
        kills.append(_told(run, death, is_last=True))
        largest = _largest_difference(run, found["uninterrupted"])
    found["kills"] += [
        kill | {"run": number, "difference": largest, "victims": victims}
        for kill in kills
    ]


def _largest_difference(run: ElasticRun, uninterrupted: list[float]) -> float:
    """Waits for the last step, and returns the largest difference of a loss."""
    assert run.wait() == 0, run.said
    assert run.last_step() == STEPS, run.said
    steps = [step for step, _ in run.losses()]
    assert {*steps} == {*range(1, STEPS + 1)}, run.said
    expected = dict(enumerate(uninterrupted, 1))
    return max(abs(x / expected[step] - 1) for step, x in run.losses())


def count_failed(found: dict[str, Any], number: int, output: str) -> None:
    """Counts a run that did not come to its last step."""
    if timeout := _GLOO_TIMEOUT.search(output):
        found["discarded"].append([number, timeout[0][:200]])
    else:
        found["wrong_ends"] += 1
        found["wrong_end_outputs"].append([number, output])


def _told(run: ElasticRun, death: Death, *, is_last: bool) -> dict[str, Any]:
    """Describes a kill; the time after one that another kill followed means nothing."""
    first, secs = run.await_step_after(death)
    return {
        "moment": run.moment_of(death),
        "phase": death.phase,
        "steps_lost": max(0, death.saved - (first - 1)),
        "seconds": round(secs, 1) if is_last else None,
    }


def grow(run: ElasticRun) -> dict[str, Any]:
    """Lets all places return, and returns what came of it."""
    generation = run.generation()
    run.job.grow()
    run.await_that(lambda: run.generation() > generation)
    lines = len(run.losses())
    before = run.losses()[-1][0]
    run.await_that(lambda: len(run.losses()) > lines)
    return {"steps_done_twice": before + 1 - run.losses()[lines][0]}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Returns what is said of all kills."""
    kills = found["kills"]
    secs = sorted(k["seconds"] for k in kills if k["seconds"] is not None)
    moments = [kill["moment"] for kill in kills]
    return {
        "killed": len(kills),
        "killed_of": dict(Counter(kill.get("victims", "one") for kill in kills)),
        "killed_in": {moment: moments.count(moment) for moment in sorted({*moments})},
        "steps_lost": sum(kill["steps_lost"] for kill in kills),
        "largest_difference": max((kill["difference"] for kill in kills), default=0),
        "median_seconds": round(statistics.median(secs), 1) if secs else None,
        "most_seconds": secs[-1] if secs else None,
        "within_30_seconds": [sum(x <= 30 for x in secs), len(secs)],
    }


if __name__ == "__main__":
    main()
