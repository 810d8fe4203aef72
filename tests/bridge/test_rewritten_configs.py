"""Configs that transformers wrote anew, as beside a fine-tune, are read alike."""

from __future__ import annotations

import json
from typing import Any

import helpers.deepseek_moe  # noqa: F401  (makes it known to transformers)
import helpers.mistral4  # noqa: F401  (makes it known to transformers)
import helpers.mllama  # noqa: F401  (makes it known to transformers)
import helpers.nemotron_nas  # noqa: F401  (makes it known to transformers)
import pytest
from tiny_configs import VARIANTS, hf_fields
from transformers import CONFIG_MAPPING

import bridge

pytestmark = pytest.mark.torch

DEEPER = 3
"""Factor of the number of layers: two digits where the tiny models have one."""


def deeper(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a model of the same layers several times over."""
    names = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
    (name,) = names & set(fields)
    layers = fields[name]
    # Falcon-H1's two multipliers of an MLP are no list of its two layers.
    listed = {
        key: value * DEEPER
        for key, value in fields.items()
        if isinstance(value, list) and len(value) == layers and "multip" not in key
    }
    if groups := fields.get("attention_types"):  # of GPT-Neo
        listed["attention_types"] = groups * DEEPER
    return {**fields, **listed, name: layers * DEEPER}


def written(fields: dict[str, Any], path) -> dict[str, Any]:
    """What transformers writes into config.json of a model of these fields."""
    CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields)).save_pretrained(path)
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_that_transformers_wrote_anew_is_read_alike(variant, tmp_path):
    fields = deeper(hf_fields(variant))
    again = written(fields, tmp_path)
    assert bridge.from_hf_config(again) == bridge.from_hf_config(fields)
