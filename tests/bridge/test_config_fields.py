"""Every field of transformers' config classes is read, inert by name, or refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from composition.config_oracle import filled
from helpers.errors import facts
from tiny_configs import VARIANTS, hf_fields
from transformers import CONFIG_MAPPING, PreTrainedConfig

import bridge
from bridge.families import FAMILIES
from bridge.families._family import REQUIRED, Family
from bridge.hf._unread import NEUTRAL

pytestmark = pytest.mark.torch

_SLIDES = {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 3}
# Fields that act only where others are set, besides those of the tiny models.
SETTINGS = {
    **{name: hf_fields(name) for name in VARIANTS},
    **{
        f"{name}-slides": hf_fields(name, **_SLIDES)
        for name in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
    },
    "smollm3-slides": hf_fields("smollm3", use_sliding_window=True, sliding_window=7),
}


def their_fields(model_type: str) -> dict[str, tuple[Any, ...]]:
    """Each field of transformers' class, with its default before and after init."""
    kind = CONFIG_MAPPING[model_type]
    made = kind()
    # Of sizes that differ between layers, an attribute has no value.
    said = made.to_dict()
    said = said if "per_layer_config" in said else {}
    return {
        field.name: (
            field.default,
            _plain(
                said[field.name]
                if field.name in said
                else getattr(made, field.name, field.default)
            ),
        )
        for field in dataclasses.fields(kind)
    }


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def our_defaults(family: Family) -> dict[str, Any]:
    codecs = {k: v for codec in family.transforms for k, v in codec.defaults.items()}
    fields = {name: field.default for name, field in family.fields.items()}
    return {**family.fixed, **family.passthrough, **codecs, **fields}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_field_that_is_read_has_the_default_of_transformers(model_type):
    ours = our_defaults(FAMILIES[model_type])
    aliases = FAMILIES[model_type].aliases
    wrong = {
        name: (ours[known], theirs)
        for name, theirs in their_fields(model_type).items()
        if (known := aliases.get(name, name)) in ours
        if ours[known] is not REQUIRED and ours[known] not in theirs
        if (ours[known], theirs) != (False, (None, None))  # both are off
    }
    assert wrong == {}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_field_that_is_not_read_is_inert_by_name_or_refused(model_type):
    family = FAMILIES[model_type]
    known = {*our_defaults(family), *family.aliases, *NEUTRAL}
    fields = hf_fields(next(n for n, f in VARIANTS.items() if _is(f, model_type)))
    for name in set(their_fields(model_type)) - known:
        with pytest.raises(ValueError, match=facts(name)):
            bridge.from_hf_config(fields | {name: 3})


def _is(fields: dict[str, Any], model_type: str) -> bool:
    return fields["model_type"] == model_type


def test_every_field_of_all_configs_is_inert_by_name_or_refused():
    names = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    refused = {
        name
        for name in names - NEUTRAL
        if "this field is not modelled" in _refusal(hf_fields("llama") | {name: True})
    }
    assert names - NEUTRAL == refused


def _refusal(fields: dict[str, Any]) -> str:
    try:
        bridge.from_hf_config(fields)
    except ValueError as error:
        return str(error)
    return ""


# A base in `attn_config` is that of the weights: transformers reads it there no more.
READ_ELSEWHERE = {("dbrx", "rope_parameters")}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_field_left_out_is_read_as_transformers_fills_it_in_or_refused(name):
    fields = SETTINGS[name]
    whole = filled(fields)
    assert bridge.from_hf_config(whole) == bridge.from_hf_config(fields)
    for given in (fields, whole):
        for left_out in given:
            if (name, left_out) in READ_ELSEWHERE:
                continue
            rest = {k: v for k, v in given.items() if k != left_out}
            theirs = None if left_out == "model_type" else filled(rest)
            if theirs is not None and not _refusal(rest):
                assert bridge.from_hf_config(rest) == bridge.from_hf_config(theirs)


def test_a_base_beside_the_heads_of_dbrx_is_read_and_written_for_both_readers():
    fields = hf_fields("dbrx")
    want = bridge.from_hf_config(fields)
    released = {k: v for k, v in fields.items() if k != "rope_parameters"}
    assert bridge.from_hf_config(released) == want
    written = bridge.to_hf_config(want)
    assert written["attn_config"]["rope_theta"] == 500
    assert filled(written)["rope_parameters"]["rope_theta"] == 500
    other = {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}
    with pytest.raises(
        ValueError, match=facts("attn_config.rope_theta", "500.0", "10.0")
    ):
        bridge.from_hf_config(other)


WRONG_PARTS = {
    "attn_config": {"clip_qkv": 8, "rotary": 3},
    "ffn_config": {"ffn_act_fn": {"name": "gelu"}, "moe_normalize_expert_weights": 2.0},
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_parts_of_dbrx_that_are_not_modelled_are_refused_by_name(name):
    said = WRONG_PARTS[name]
    last, value = list(said.items())[-1]
    with pytest.raises(ValueError, match=facts(f"{name}.{last}", str(value))):
        bridge.from_hf_config(hf_fields("dbrx") | {name: said})


def test_heads_of_codegen_are_in_four_parts():
    with pytest.raises(ValueError, match=facts("n_head", "6", "4")):
        bridge.from_hf_config(hf_fields("codegen") | {"n_head": 6, "n_embd": 48})
