"""A field that transformers reads otherwise, or not at all, is refused or inert."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.errors import facts
from tiny_configs import FAMILIES, VARIANTS, YARN_ROPE, hf_fields, searched_layer

import bridge

TURNED_IN_PART = {
    *("sarvam_moe", "solar_open", "bamba", "recurrent_gemma", "persimmon"),
    *("phi", "phi3", "glm", "glm4", "glm4_moe", "minimax_m2", "nemotron", "stablelm"),
    "minimax_m3_vl_text",
    *("gpt_neox", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
}
# Whose files do not have the field: learned positions, ALiBi, no positions, no
# attention, or another field in its place.
WITHOUT_FACTOR = {
    *("gpt2", "gpt_bigcode", "opt", "gptj", "bloom", "mpt", "mamba", "mamba2", "jamba"),
    *("gpt_neo", "falcon_mamba", "codegen", "xglm", "biogpt", "zamba"),
    "openai-gpt",
}
# Whose layers of each kind have a rope of their own: the field beside is not read.
BY_LAYER_TYPE = {"gemma4_text", "mellum", "lfm3", "deepseek_v4", "mimo_v2_flash"}
BY_LAYER_TYPE |= {"cohere_compass_text", "laguna"}
NOT_WHOLE = TURNED_IN_PART | WITHOUT_FACTOR | BY_LAYER_TYPE
# Whose attention has no positions, so that the field changes no number.
NOTHING_TO_TURN = {
    *("bloom", "gpt2", "gpt_bigcode", "jamba", "mamba", "mamba2", "mpt", "nemotron_h"),
    *("opt", "gpt_neo", "falcon_mamba", "kimi_linear", "xglm", "biogpt", "zamba"),
    "openai-gpt",
}
WITHOUT_POSITIONS = {"granitemoehybrid", *NOTHING_TO_TURN}
WHOLE = [
    name
    for name in FAMILIES
    if VARIANTS[name]["model_type"] not in NOT_WHOLE and name not in WITHOUT_POSITIONS
]


@pytest.mark.parametrize("variant", sorted(WITHOUT_POSITIONS))
def test_a_family_without_positions_has_none_to_turn(variant):
    fields = hf_fields(variant, partial_rotary_factor=0.5)
    assert bridge.from_hf_config(fields).rope is None


@pytest.mark.parametrize("variant", sorted(NOTHING_TO_TURN))
def test_a_rope_in_the_file_of_a_family_without_one_changes_nothing(variant):
    fields = hf_fields(variant)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    extra = {"rope_parameters": rope, "rope_theta": 10000.0}
    assert bridge.from_hf_config(fields | extra).rope is None
    want = bridge.from_hf_config(fields)
    assert bridge.from_hf_config(fields | {"rope_parameters": rope}) == want
    longer = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match=facts("rope_parameters", "'dynamic'")):
        bridge.from_hf_config(fields | {"rope_parameters": longer})


@pytest.mark.parametrize("variant", WHOLE)
def test_a_family_of_whole_heads_refuses_to_turn_a_part(variant):
    fields = hf_fields(variant)
    with pytest.raises(ValueError, match=facts("partial_rotary_factor", "0.5")):
        bridge.from_hf_config(fields | {"partial_rotary_factor": 0.5})
    whole = bridge.from_hf_config(fields | {"partial_rotary_factor": 1.0})
    assert whole == bridge.from_hf_config(fields)


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_a_family_that_turns_a_part_writes_which(factor):
    config = bridge.from_hf_config(hf_fields("glm4", partial_rotary_factor=factor))
    assert config.rope is not None and config.rope.partial_rotary_factor == factor
    written = bridge.to_hf_config(config)
    assert bridge.from_hf_config(written) == config
    assert written.get("partial_rotary_factor", 0.5) == factor


def test_a_cap_that_attention_never_reads_is_kept_and_not_applied():
    fields = hf_fields("gemma3", attn_logit_softcapping=50.0)
    config = bridge.from_hf_config(fields)
    assert config.attn_logit_softcapping is None
    assert bridge.to_hf_config(config)["attn_logit_softcapping"] == 50.0


def test_windows_begin_at_layer_28_where_the_file_does_not_say():
    fields = hf_fields("qwen2-sliding", num_hidden_layers=30)
    del fields["max_window_layers"]
    assert bridge.from_hf_config(fields).windows == (None,) * 28 + (9, 9)


def test_three_layers_are_dense_where_the_file_does_not_say():
    fields = hf_fields("deepseek_v3", num_hidden_layers=5)
    del fields["first_k_dense_replace"]
    assert bridge.from_hf_config(fields).dense_layers == (0, 1, 2)


_YARN = {**YARN_ROPE, "truncate": False}
_PHI_YARN = {"rope_parameters": YARN_ROPE, "original_max_position_embeddings": 32}
_MSCALES = {
    "rope_parameters": {
        **VARIANTS["phi3-longrope-long"]["rope_parameters"],
        "short_mscale": 1.3,
        "long_mscale": 1.5,
    }
}
_TYPE = {"type": "linear", "factor": 2.0}


def _blocks(first: Any) -> dict[str, Any]:
    """Layers of which the first is another one."""
    others = VARIANTS["nemotron-nas"]["block_configs"][1:]
    return {"block_configs": [first, *others]}


@pytest.mark.parametrize("base, found", [(5e5, 5e5), (None, 1e4)])
def test_a_sliding_rope_without_a_base_takes_the_one_beside_it(base, found):
    ropes = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    ropes["sliding_attention"] = {"rope_type": "default"}
    changes = {"rope_parameters": ropes, "rope_theta": base}
    config = bridge.from_hf_config(hf_fields("gemma4", **changes))
    assert (config.rope.rope_theta, config.sliding_rope.rope_theta) == (1e6, found)


@pytest.mark.parametrize(
    "variant, changes, match",
    [
        (
            "gemma3",
            {"sliding_window_pattern": 0, "layer_types": None},
            "sliding_window_pattern + 0",
        ),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval + 0"),
        ("smollm3", {"no_rope_layers": []}, "no_rope_layers + 0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step + 0"),
        ("qwen3_moe", {"decoder_sparse_step": True}, "decoder_sparse_step + True"),
        ("qwen2-sliding", {"max_window_layers": None}, "sliding_window + layer_types"),
        ("qwen2-sliding", {"layer_types": []}, "0 + 3"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ("deepseek_v3", {"first_k_dense_replace": None}, "first_k_dense_replace"),
        ("deepseek_v2-groups", {"n_group": None}, "n_group + topk_group"),
        ("deepseek_v2", {"topk_method": None}, "topk_method + None"),
        ("deepseek_v2", {"n_shared_experts": 0}, "n_shared_experts + 0"),
        ("llama", {"is_causal": False}, "is_causal + False"),
        ("llama", {"is_causal": None}, "is_causal + None"),
        ("olmo3", {"rope_scaling": _TYPE}, "rope_scaling + 'type': 'linear'"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": _YARN}},
            "truncate + False",
        ),
        ("phi3", _PHI_YARN, "yarn + longrope"),
        ("phi3-longrope-long", _MSCALES, "short_mscale = 1.3 + long_mscale = 1.5"),
        ("nemotron-nas", {"block_configs": None}, "block_configs + 5"),
        ("nemotron-nas", {"num_hidden_layers": 4}, "block_configs + 4"),
        (
            "nemotron-nas",
            _blocks(searched_layer(1, 8.0)),
            "block_configs + n_heads_in_group + [1, 2]",
        ),
        (
            "nemotron-nas",
            _blocks(searched_layer(None, None)),
            "layer 0",
        ),
        (
            "nemotron-nas",
            _blocks({"attention": {"replace_with_linear": True}, "ffn": 3}),
            "block_configs[0].attention.replace_with_linear + [0].ffn + 3",
        ),
        (
            "nemotron-nas",
            _blocks({**searched_layer(2, 8.0), "parallel_blocks": [1]}),
            "block_configs[0].parallel_blocks + [1]",
        ),
        (
            "nemotron-nas",
            _blocks(searched_layer(2, -1.0)),
            "block_configs[0].ffn.ffn_mult + -1.0",
        ),
    ],
)
def test_a_value_that_is_read_otherwise_is_refused_by_name(variant, changes, match):
    with pytest.raises(ValueError, match=facts(*match.split(" + "))):
        bridge.from_hf_config(hf_fields(variant, **changes))
