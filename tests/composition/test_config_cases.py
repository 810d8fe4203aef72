"""A mutated config file is read as transformers reads it, or refused: a short run.

`benchmarks/config_fuzz.py` runs thousands, of every family.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from composition.config_cases import (
    FULL,
    SLIDING,
    ConfigCase,
    case_of_seed,
    draw_case,
    field_pairs,
)
from composition.config_oracle import filled, outcome_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_configs import LINEAR_ROPE, VARIANTS, YARN_ROPE, hf_fields

import bridge
from bridge.families import FAMILIES
from bridge.models import DecoderConfig

pytestmark = pytest.mark.torch

# Few, for each compiles its operations: tied, windows, two ropes, experts.
QUICK = ("llama-tied", "qwen2-sliding", "olmo3", "deepseek_v3")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "config_fuzz.json"


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_a_mutated_config_is_read_as_transformers_reads_it_or_refused(data):
    case = draw_case(lambda options: data.draw(st.sampled_from(options)), QUICK)
    outcome = outcome_of(case)
    replay = f"config_fuzz.py --case '{case.to_json()}'"
    assert outcome.kind != "differ", f"off by {outcome.error:.1e}; replay: {replay}"


def test_what_is_read_is_written_so_that_transformers_reads_the_same():
    for seed in range(len(field_pairs(tuple(VARIANTS)))):
        drawn = case_of_seed(seed)
        if (config := _read(drawn)) is not None:
            again = filled(bridge.to_hf_config(config))
            assert again is not None, drawn.to_json()
            assert bridge.from_hf_config(again) == config, drawn.to_json()


def _read(drawn: ConfigCase) -> DecoderConfig | None:
    """The config of a case that both read, as an export says it."""
    try:
        config = bridge.from_hf_config(drawn.fields)
    except ValueError:
        return None
    passthrough = {**dict(config.passthrough), **FAMILIES[config.model_type].left_out}
    config = dataclasses.replace(config, passthrough=tuple(passthrough.items()))
    return None if filled(drawn.fields) is None else config


def case(variant: str, head: str = "as_saved", **changes: Any) -> ConfigCase:
    fields = hf_fields(variant, **copy.deepcopy(changes))
    absent = [name for name, value in changes.items() if value is ...]
    return ConfigCase({k: v for k, v in fields.items() if k not in absent}, head)


_YARN = {"type": "yarn", **{k: v for k, v in YARN_ROPE.items() if k != "rope_type"}}
_NESTED = {SLIDING: {**YARN_ROPE, "truncate": False}, FULL: LINEAR_ROPE}
_ON = {"use_sliding_window": True, "sliding_window": 5}
# Files that were once computed otherwise than transformers does, in silence.
ONCE_WRONG = {
    "a tied model with another head": (case("llama-tied", "other"), "refused"),
    "a tied model with the same head": (case("llama-tied", "same"), "agree"),
    "heads turned in part": (case("llama", partial_rotary_factor=0.5), "refused"),
    "no factor in glm4": (case("glm4", partial_rotary_factor=None), "agree"),
    "whole heads in glm4": (case("glm4", partial_rotary_factor=1.0), "agree"),
    "an unread cap": (case("gemma3", attn_logit_softcapping=1.5), "agree"),
    "no max_window_layers": (case("qwen2-sliding", max_window_layers=...), "agree"),
    "no first_k_dense_replace": (
        case("deepseek_v3", first_k_dense_replace=..., num_hidden_layers=4),
        "agree",
    ),
    "attention to what follows": (case("llama", is_causal=False), "refused"),
    "an unread type of scaling": (case("olmo3", rope_scaling=_YARN), "refused"),
    "a border that is not truncated by null": (
        case("qwen2", rope_parameters={**YARN_ROPE, "truncate": None}),
        "agree",
    ),
    "an unread border of one rope of two": (
        case("olmo3", rope_parameters=_NESTED),
        "refused",
    ),
    "an empty list of layers": (case("qwen2", layer_types=[], **_ON), "rejected"),
}


@pytest.mark.parametrize("planted, kind", ONCE_WRONG.values(), ids=ONCE_WRONG)
def test_a_file_that_was_read_otherwise_is_read_as_transformers_does(planted, kind):
    outcome = outcome_of(planted)
    assert outcome.kind == kind, (outcome, planted.to_json())


def test_a_case_is_replayed_as_it_was_printed():
    drawn = ConfigCase(hf_fields("gemma3"), "same")
    assert ConfigCase.from_json(drawn.to_json()) == drawn


def test_the_long_run_found_no_config_that_differs():
    found = json.loads(RESULTS.read_text())
    assert found["cases"] >= 1000 and found["differ"] == 0
    assert found["agree"] >= found["cases"] // 3  # refusing everything is no success
    assert found["mismatches"] == []
