"""Command A Plus: which layers turn, slide and are dense, by fields of its files."""

from __future__ import annotations

import pytest
from helpers.errors import facts
from tiny_configs import hf_fields

import bridge

FULL, SLIDING = "full_attention", "sliding_attention"


def test_dense_layers_come_first_and_attend_to_all():
    config = bridge.from_hf_config(hf_fields("cohere2_moe", num_hidden_layers=5))
    assert config.layer_types == (FULL, SLIDING, FULL, SLIDING, FULL)
    assert config.dense_layers == (0,)
    assert config.intermediate_size == 40
    assert config.moe is not None and config.moe.intermediate_size == 24


# Full layers turn if they are dense and all dense layers are full.
@pytest.mark.parametrize("period, still", [(1, (2,)), (2, (1, 2))])
def test_full_layers_turn_that_are_dense(period, still):
    given = {
        "first_k_dense_replace": 2,
        "layer_types": [SLIDING, FULL, FULL],
        "prefix_dense_sliding_window_pattern": period,
    }
    config = bridge.from_hf_config(hf_fields("cohere2_moe", **given))
    assert config.no_rope_layers == still
    assert bridge.from_hf_config(bridge.to_hf_config(config)) == config


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"expert_selection_fn": "relu"}, ("expert_selection_fn", "'relu'")),
        (
            {"shared_expert_combination_strategy": "max"},
            ("shared_expert_combination_strategy", "'max'"),
        ),
        ({"sliding_window": None}, ("sliding_window", "None")),
        ({"sliding_window_pattern": 0}, ("sliding_window_pattern", "0")),
        ({"first_k_dense_replace": 4}, ("first_k_dense_replace", "4", "3")),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            ("rope_scaling", "4.0", "rope_parameters"),
        ),
    ],
)
def test_a_field_that_says_otherwise_is_refused(changes, said):
    with pytest.raises(ValueError, match=facts(*said)):
        bridge.from_hf_config({**hf_fields("cohere2_moe"), **changes})


def test_a_scaled_rope_is_written_where_transformers_reads_it():
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    config = bridge.from_hf_config(hf_fields("cohere2_moe", rope_parameters=rope))
    fields = bridge.to_hf_config(config)
    assert fields["rope_parameters"] == rope and "rope_scaling" not in fields
    assert bridge.from_hf_config(fields) == config
