"""A composed model trains on a mesh as on one device: a short run, and what is drawn.

`benchmarks/composition_fuzz.py` runs thousands.
"""

from __future__ import annotations

import dataclasses

import pytest
from composition.composition_draw import case_of_seed
from composition.composition_oracle import outcome_of
from composition.compositions import (
    FRAMEWORKS,
    MESHES,
    MISUSES,
    NORMS,
    OPTIMIZERS,
    POLICIES,
    SHARINGS,
    SOWN,
    STRATEGIES,
    WRAPS,
    Composition,
)
from composition.planted import PLANTED, planted, watched

# As many as have each strategy twice and each framework.
QUICK = range(12)


@pytest.mark.long
@pytest.mark.parametrize("seed", QUICK)
def test_a_composition_trains_as_on_one_device_or_is_refused(seed):
    case = case_of_seed(seed)
    outcome = outcome_of(case)
    replay = f"composition_fuzz.py --case '{case.to_json()}'"
    assert outcome.kind != "differ", f"{outcome}; replay: {replay}"


def test_a_few_cases_have_every_framework_and_strategy():
    cases = [case_of_seed(seed) for seed in QUICK]
    assert {case.framework for case in cases} == {*FRAMEWORKS}
    assert {case.strategy for case in cases} == {*STRATEGIES}


def test_many_cases_have_every_choice():
    cases = [case_of_seed(seed) for seed in range(300)]
    choices = {
        "wrap": WRAPS,
        "sharing": SHARINGS,
        "norm": NORMS,
        "sow": SOWN,
        "misuse": MISUSES,
        "optimizer": OPTIMIZERS,
        "policy": POLICIES,
    }
    for name, drawn in choices.items():
        assert {getattr(case, name) for case in cases} == {*drawn}
    assert {case.mesh for case in cases} == {tuple(mesh.items()) for mesh in MESHES}
    for field in dataclasses.fields(Composition):
        assert len({getattr(case, field.name) for case in cases}) > 1, field.name


def test_a_case_is_replayed_as_it_was_printed():
    for seed in range(20):
        drawn = case_of_seed(seed)
        assert Composition.from_json(drawn.to_json()) == drawn


def test_a_planted_fault_is_taken_out_again():
    assert len(PLANTED) >= 20
    for changes in PLANTED.values():
        before = [getattr(owner, attribute) for owner, attribute, _ in changes]
        with planted(changes):
            within = [getattr(owner, attribute) for owner, attribute, _ in changes]
        after = [getattr(owner, attribute) for owner, attribute, _ in changes]
        assert before == after and all(
            a is not b for a, b in zip(before, within, strict=True)
        )


def test_a_fault_counts_as_met_once_its_function_is_called():
    name = "means that are sums"
    ((owner, attribute, _),) = PLANTED[name]
    with watched({name: PLANTED[name]}) as called:
        assert called == set()
        getattr(owner, attribute)({"means": [], "sums": [], "rows": []}, ())
        assert called == {name}
