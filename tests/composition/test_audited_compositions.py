"""Composed models are compiled for GPUs as their plans say: those that were not once.

`benchmarks/composition_audit.py` compiles hundreds.
"""

from __future__ import annotations

import pytest
from composition_audit import audited

SEEDS = {
    3: "XLA moves what the optimizer keeps, and names that after an argument",
    4: "gathers of two units are merged, before a loop of the loss",
    8: "the optimizer's state has dotted names, and tp splits weights",
    137: "layers are padded for the stages of a pipeline, so the norm would send them",
    142: "a loop of the loss runs a stack and a unit",
    157: "statistics of BatchNorms are reduced with gradients",
}


# What rows_of draws in float64 is float32 without x64, which compositions run with.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")


@pytest.mark.each_case  # each found another fault
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("seed", SEEDS, ids=SEEDS.values())
def test_a_composition_is_compiled_as_planned(seed):
    assert audited(seed) == ("as_planned", [])
