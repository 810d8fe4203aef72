"""What bridge knows of transformers' config fields is what transformers reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import transformers_fields
from test_unread_fields import PUBLISHED
from tiny_configs import FAMILIES, SIZES, hf_fields
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

import bridge
from bridge.families._transformers_fields import BY_MODEL_TYPE, COMMON, ROPE_KEYS

pytestmark = pytest.mark.torch

# What is asked for and changes no number of a decoder: an attribute of the configs
# themselves, how a model is split, what is returned besides, what vision models take.
ASKED_IN_VAIN = frozenset(
    """
    _heterogeneity_spec base_model_ep_plan base_model_fsdp_plan output_cross_attentions
    output_router_logits serialize_explicit_per_layer_config
    vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    """.split()
)

# What the output of a model and its argument are called: by 5.24, then before it.
CACHES = {"cache", "past_key_values", "cache_params"}


def test_the_names_are_those_of_the_transformers_that_is_installed():
    common, own = transformers_fields.known_fields()
    rope = transformers_fields.known_rope_keys()
    written = transformers_fields.OUT.read_text()
    assert transformers_fields.as_json(common, own, rope) == written, (
        "run `PYTHONPATH=tests python tests/helpers/transformers_fields.py`"
    )
    assert (common, own, rope) == (COMMON, BY_MODEL_TYPE, ROPE_KEYS)


@pytest.mark.parametrize("variant", FAMILIES)
def test_every_field_that_a_model_asks_its_config_for_is_known(variant, monkeypatch):
    config = their_config(hf_fields(variant))
    asked: set[str] = set()
    get = PreTrainedConfig.__getattribute__

    def record(self: PreTrainedConfig, name: str) -> Any:
        asked.add(name)
        return get(self, name)

    monkeypatch.setattr(PreTrainedConfig, "__getattribute__", record)
    logits_of(config)
    monkeypatch.undo()
    fields = {name for name in asked if transformers_fields.is_field(name)}
    assert {"vocab_size", "attention_chunk_size"} & fields  # it has recorded
    known = COMMON | BY_MODEL_TYPE[config.model_type]
    assert fields - known - ASKED_IN_VAIN == set()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_that_is_left_out_changes_no_logit_of_transformers(name):
    variant, extra, _ = PUBLISHED[name]
    extra = {k: v for k, v in extra.items() if k != "auto_map"}
    plain, published = hf_fields(variant), hf_fields(variant, **extra)
    theirs = logits_of(their_config(plain))
    torch.testing.assert_close(
        logits_of(their_config(published)), theirs, rtol=0, atol=0
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read_as_transformers_fills_it_in(name):
    variant, extra, _ = PUBLISHED[name]
    fields = hf_fields(variant, **extra)
    theirs = their_config(fields).to_dict()
    assert bridge.from_hf_config(theirs) == bridge.from_hf_config(fields)


def test_a_field_that_is_not_left_out_changes_logits_of_transformers():
    plain = hf_fields("granite", residual_multiplier=1.0)
    other = hf_fields("granite", residual_multiplier=0.5)
    difference = logits_of(their_config(plain)) - logits_of(their_config(other))
    assert difference.abs().max() > 1e-3
    assert "residual_multiplier" in BY_MODEL_TYPE["granite"]


def their_config(fields: dict[str, Any]) -> PreTrainedConfig:
    fields = dict(fields)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def logits_of(config: PreTrainedConfig) -> torch.Tensor:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(12)[None] % SIZES["vocab_size"]
    with torch.no_grad():
        out = model(tokens, labels=tokens, use_cache=True)
        # RecurrentGemma keeps its states in its layers, and returns none.
        cache = {name: out[name] for name in CACHES & set(out)}
        more = model(tokens[:, :1], **cache)
    return torch.cat([out.logits, more.logits], 1)
