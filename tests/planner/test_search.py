"""A search of schedules finds the best within its budget, and says what it gains."""

from __future__ import annotations

import dataclasses
import types

import pytest
from helpers.errors import facts

from fsdp_jax.planner import Knob, search_schedules

GIB = 1 << 30


@dataclasses.dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """Steps whose seconds and memory are a formula of two settings."""

    def __init__(self, seconds, memory=lambda **_: GIB, cost=1.0):
        self.seconds, self.memory, self.cost = seconds, memory, cost
        self.clock, self.asked = Clock(), []

    def __call__(self, settings):
        self.asked.append(dict(settings))
        self.clock.now += self.cost
        seconds, memory = self.seconds(**settings), self.memory(**settings)
        timeline = types.SimpleNamespace(
            seconds=seconds, exposed_seconds=0.1 * seconds, sent=()
        )
        return types.SimpleNamespace(
            timeline=timeline,
            compiled_bytes=memory,
            fits=memory <= 10 * GIB,
            exposed=0.1,
        )


START = {"a": 1, "b": 1}
KNOBS = (Knob("a", (1, 2, 4)), Knob("b", (1, 2, 4)))


def search(steps, knobs=KNOBS, start=START, seconds=100.0):
    return search_schedules(steps, start, knobs, seconds=seconds, clock=steps.clock)


def coupled(a, b, **_):
    """Best at a=4, b=2; from a=1 no b is better."""
    return 10 - a - (b if a == 4 and b < 4 else 0) + (b if a == 1 else 0)


def test_the_best_is_found_one_knob_after_the_other():
    found = search(Steps(coupled))
    assert found.best.changed == {"a": 4, "b": 2}
    assert found.complete and found.trials[0].changed == {}
    assert found.gain == pytest.approx(1 - 4 / 10)
    assert "a=4, b=2" in repr(found) and "60.0%" in repr(found)


def test_no_settings_are_compiled_twice():
    steps = Steps(coupled)
    search(steps)
    assert len(steps.asked) == len({tuple(s.items()) for s in steps.asked})


def test_what_does_not_fit_is_not_chosen_if_anything_fits():
    memory = {1: 11 * GIB, 2: 12 * GIB, 4: 9 * GIB}
    found = search(Steps(lambda a, b: a, lambda a, b: memory[a]))
    # The slowest of all is the only one that fits.
    assert found.best.changed == {"a": 4}
    assert "which the default does not" in repr(found)
    nothing = search(Steps(lambda a, b: a, lambda a, b: 11 * GIB))
    assert "none of the" in repr(nothing)


def test_a_default_that_nothing_beats_stays():
    steps = Steps(lambda a, b: 1.0 - 1e-5 * (a + b))  # within what is noticed
    found = search(steps)
    assert found.best is found.trials[0] and found.gain == 0
    assert "the default is the best of 5 schedules" in repr(found)


def test_no_trial_is_begun_that_would_end_after_the_budget():
    steps = Steps(coupled, cost=10.0)
    found = search(steps, seconds=35.0)
    assert steps.clock.now == 30.0 == found.seconds
    assert not found.complete and "ended the search after 3" in repr(found)
    assert found.best.changed == {"a": 4}
    # The default is tried whatever the budget.
    assert len(search(Steps(coupled, cost=10.0), seconds=1.0).trials) == 1


def test_what_is_not_possible_is_left_out_with_its_reason():
    def seconds(a, b):
        if a == 4:
            raise ValueError("a of 4 needs more layers")
        return coupled(a, b)

    found = search(Steps(seconds))
    assert found.best.changed == {"a": 2}
    assert "not possible: a=4: a of 4 needs more layers" in repr(found)


def test_a_default_that_is_not_possible_is_an_error():
    def seconds(a, b):
        raise ValueError("no mesh of 7")

    with pytest.raises(ValueError, match=facts(7)):
        search(Steps(seconds))


def test_what_is_not_modelled_is_shown_with_the_best_and_never_chosen():
    steps = Steps(lambda a, b, pipelined: coupled(a, b) - 3 * pipelined)
    knobs = (Knob("pipelined", (True,), measured=False), *KNOBS)
    found = search(steps, knobs, START | {"pipelined": False})
    assert found.best.changed == {"a": 4, "b": 2}
    last = found.trials[-1]
    assert last.changed == {"a": 4, "b": 2, "pipelined": True}
    assert not last.measured and last.estimate.timeline.seconds == 1
    before, after = repr(found).split("not measured")
    assert "pipelined" in after and "pipelined" not in before
