"""A field that transformers' model never reads is left out; any other is refused."""

from __future__ import annotations

import json

import pytest
from bridge_helpers import HF_CONFIG
from helpers.errors import facts
from tiny_configs import FAMILIES, hf_fields

import bridge
from bridge.families import FAMILIES as FAMILY_TABLE
from bridge.families._transformers_fields import BY_MODEL_TYPE, COMMON
from bridge.hf._unread import NEUTRAL, not_turned, read_names
from fsdp_jax.cli import main

REMOTE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    "AutoTokenizer": "somebody/tokenizer",
}
# What published files say beside the fields of their family, and what is told of it.
PUBLISHED = {
    "ALLaM-7B": ("llama", {"internal_version": "7b-alpha"}, {"internal_version"}),
    "Llama-2-13b": ("llama", {"pretraining_tp": 2}, set()),
    "Megrez-3B": ("llama", {"max_sequence_length": 32768}, {"max_sequence_length"}),
    "SmolLM2-360M": (
        "llama",
        {
            "is_llama_config": True,
            "rope_interleaved": False,
            "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        },
        {"is_llama_config", "transformers.js_config"},
    ),
    "Mistral-7B": ("mistral", {"num_beam_groups": 1}, set()),
    "Qwen3-Coder-480B": (
        "qwen3_moe",
        {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0},
        {"use_qk_norm"},
    ),
    "distilgpt2": ("gpt2", {"_num_labels": 1}, {"_num_labels"}),
    "gpt2-medium": (
        "gpt2",
        {"n_special": 0, "predict_special_tokens": True},
        {"predict_special_tokens"},
    ),
    "gpt2-xl": ("gpt2", {"output_past": True}, {"output_past"}),
    "gemma-2-27b": (
        "gemma2",
        {"sliding_window_size": 4096, "_attn_implementation": "eager"},
        {"sliding_window_size"},
    ),
    "gpt-oss-20b-unsloth": ("gpt_oss", {"unsloth_fixed": True}, {"unsloth_fixed"}),
    "GLM-5.2": (
        "glm_moe_dsa",
        {
            "head_dim": 192,
            "index_share_for_mtp_iteration": True,
            "moe_router_dtype": "float32",
            "rope_interleave": True,
        },
        {"index_share_for_mtp_iteration", "moe_router_dtype"},
    ),
    "Llama-4-Scout": ("llama4", {"no_rope_layers": []}, set()),
    "Phi-4-mini": (
        "phi3",
        {
            "auto_map": REMOTE,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
        },
        {"full_attn_mod", "interpolate_factor"},
    ),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_files_say_besides_changes_no_config(name):
    variant, extra, told = PUBLISHED[name]
    config = bridge.from_hf_config(hf_fields(variant, **extra))
    assert config == bridge.from_hf_config(hf_fields(variant))
    assert set(bridge.left_out_fields(hf_fields(variant, **extra))) == told
    assert told.isdisjoint(bridge.to_hf_config(config))


@pytest.mark.parametrize("variant", FAMILIES)
def test_nothing_is_left_out_of_a_file_that_is_read_whole(variant):
    assert bridge.left_out_fields(hf_fields(variant)) == {}
    written = bridge.to_hf_config(bridge.from_hf_config(hf_fields(variant)))
    assert bridge.left_out_fields(written) == {}


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_field_that_no_model_reads_is_left_out_and_told(variant):
    extra = {"a_new_multiplier": 3.0, "notes": {"by": "us"}, "off": False, "none": None}
    fields = hf_fields(variant, **extra)
    base = bridge.from_hf_config(hf_fields(variant))
    assert bridge.from_hf_config(fields) == base
    told = {"a_new_multiplier": 3.0, "notes": {"by": "us"}}
    assert bridge.left_out_fields(fields) == told


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_field_that_a_model_reads_and_that_is_not_modelled_is_refused(variant):
    fields = hf_fields(variant)
    family = FAMILY_TABLE[fields["model_type"]]
    known = COMMON | BY_MODEL_TYPE[family.model_type]
    unread = known - read_names(family) - NEUTRAL - not_turned(family)
    others = {"attention_chunk_size", "kv_sharing_modes"} - read_names(family)
    assert others <= unread
    with pytest.raises(ValueError) as error:
        bridge.from_hf_config(fields | dict.fromkeys(unread, 7))
    assert {name for name in unread if f"{name} = 7: " in str(error.value)} == unread
    assert bridge.left_out_fields(fields | dict.fromkeys(unread, 7)) == {}


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_field_that_remote_code_may_read_is_refused_with_a_way_out(variant):
    fields = hf_fields(variant, auto_map=REMOTE, a_new_multiplier=3.0, other=1)
    ways = "ignore_fields=('a_new_multiplier',)", "--ignore-field other"
    wanted = ("a_new_multiplier = 3.0", "other = 1", "modeling_phi3.Phi3ForCausalLM")
    with pytest.raises(ValueError, match=facts(*wanted, *ways)):
        bridge.from_hf_config(fields)
    ignored = "a_new_multiplier", "other"
    config = bridge.from_hf_config(fields, ignore_fields=ignored)
    assert config == bridge.from_hf_config(hf_fields(variant))
    told = bridge.left_out_fields(fields, ignore_fields=ignored)
    assert told == {"a_new_multiplier": 3.0, "other": 1}


@pytest.mark.parametrize("auto_map", ["modeling.py", ["x"], {"AutoModel": "m.M"}])
def test_an_auto_map_of_another_kind_names_code_too(auto_map):
    with pytest.raises(ValueError, match=facts("mystery = 1", "auto_map")):
        bridge.from_hf_config(HF_CONFIG | {"auto_map": auto_map, "mystery": 1})


def test_an_auto_map_of_a_tokenizer_alone_names_no_model():
    fields = HF_CONFIG | {"auto_map": {"AutoTokenizer": ["t.T", None]}, "mystery": 1}
    assert bridge.from_hf_config(fields) == bridge.from_hf_config(HF_CONFIG)


def test_a_value_that_published_files_do_not_have_is_left_to_the_remote_code():
    fields = hf_fields("phi3", auto_map=REMOTE, full_attn_mod=2, interpolate_factor=1)
    with pytest.raises(ValueError, match=facts("full_attn_mod = 2")):
        bridge.from_hf_config(fields)


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_field_that_is_read_cannot_be_ignored(variant):
    fields = hf_fields(variant)
    read = read_names(FAMILY_TABLE[fields["model_type"]])
    for reads in (bridge.from_hf_config, bridge.left_out_fields):
        with pytest.raises(ValueError) as error:
            reads(fields, ignore_fields=sorted(read))
        assert all(f"ignore_fields has {name}:" in str(error.value) for name in read)


def test_ignored_fields_and_refused_ones_are_named_in_one_error():
    fields = HF_CONFIG | {"hidden_act": "gelu", "attention_chunk_size": 8}
    wanted = ("ignore_fields", "hidden_size", "hidden_act", "attention_chunk_size = 8")
    with pytest.raises(ValueError, match=facts(*wanted)):
        bridge.from_hf_config(fields, ignore_fields=["hidden_size"])


def test_one_string_is_no_list_of_fields():
    for reads in (bridge.from_hf_config, bridge.left_out_fields):
        with pytest.raises(ValueError, match=facts("ignore_fields=('mystery',)")):
            reads(HF_CONFIG, ignore_fields="mystery")


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_key_of_a_rope_that_no_model_reads_is_left_out(name):
    fields = hf_fields("qwen3", **{name: YARN})
    # DeepSeek-R1-0528-Qwen3-8B has the one, YaRN's own models the other.
    extra = {name: {**YARN, "attn_factor": 0.878, "finetuned": False}}
    assert bridge.from_hf_config(fields | extra) == bridge.from_hf_config(fields)
    assert bridge.left_out_fields(fields | extra) == {f"{name}.attn_factor": 0.878}
    remote = fields | extra | {"auto_map": REMOTE}
    with pytest.raises(ValueError, match=facts(f"{name}.attn_factor = 0.878")):
        bridge.from_hf_config(remote)
    bridge.from_hf_config(remote, ignore_fields=[f"{name}.attn_factor"])


def test_a_key_of_a_rope_that_other_ropes_have_stays_refused():
    fields = hf_fields("qwen3", rope_scaling={**YARN, "low_freq_factor": 1.0})
    with pytest.raises(ValueError, match=facts("rope_scaling", "low_freq_factor")):
        bridge.from_hf_config(fields)


# From the command line


def test_a_command_tells_what_is_left_out_in_one_line(llama, tmp_path, capsys):
    fields = json.loads((llama / "config.json").read_text())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fields | {"unsloth_fixed": True, "notes": ["x"] * 99}))
    out = str(tmp_path / "out")
    argv = ["convert", str(llama), out, "--to", "hf", "--config", str(config)]
    assert main(argv) == 0
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if "unsloth_fixed = True" in line]
    assert "notes = " in line and len(line) < 250
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert not {"unsloth_fixed", "notes"} & set(written)


def test_a_command_ignores_the_fields_that_it_is_told(llama, tmp_path, capsys):
    fields = json.loads((llama / "config.json").read_text())
    remote = {"auto_map": REMOTE, "mystery": 1, "riddle": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fields | remote))
    argv = ["convert", str(llama), str(tmp_path / "out"), "--to", "hf"]
    argv += ["--config", str(config)]
    assert main(argv) != 0
    assert "--ignore-field mystery" in capsys.readouterr().err
    argv += ["--ignore-field", "mystery", "--ignore-field", "riddle"]
    assert main(argv) == 0
    assert "mystery = 1" in capsys.readouterr().err
    assert main([*argv, "--ignore-field", "hidden_size"]) != 0
