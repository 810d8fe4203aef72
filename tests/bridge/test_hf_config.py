"""Configs of transformers 4 and 5 mean the same; what is not modelled is refused."""

import dataclasses
import json

import pytest
from bridge_helpers import HF_CONFIG
from helpers.errors import facts
from tiny_configs import VARIANTS, hf_fields

import bridge
from bridge.families import FAMILIES as FAMILY_TABLE
from bridge.models import DecoderConfig, MoEConfig, RopeConfig

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BASE = {k: v for k, v in HF_CONFIG.items() if k != "rope_theta"}


def test_the_fields_are_the_files():
    config = bridge.from_hf_config(HF_CONFIG)
    assert (config.head_dim, config.num_key_value_heads) == (16, 2)
    assert config.head_dim != config.hidden_size // config.num_attention_heads
    assert (config.bos_token_id, config.eos_token_id) == (
        1,
        2,
    )  # as transformers has it


def test_derived_sizes_follow_when_the_file_is_silent():
    fields = BASE | {"head_dim": None, "num_key_value_heads": None}
    config = bridge.from_hf_config(fields)
    assert (config.head_dim, config.num_key_value_heads) == (6, 8)


FORMS = {
    "4": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "4, old key": {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    "5": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "5, theta outside": {
        "rope_theta": 5e5,
        "rope_parameters": {"rope_type": "llama3", **LLAMA3},
    },
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_rope_is_read_alike(form):
    expected = RopeConfig(rope_theta=5e5, rope_type="llama3", **LLAMA3)
    assert bridge.from_hf_config(BASE | form).rope == expected


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig(5e5, "linear", factor=4.0),
        RopeConfig(5e5, "llama3", **LLAMA3),
    ],
)
def test_both_forms_are_written_and_either_alone_is_enough(rope):
    config = DecoderConfig(131, 48, 80, 3, 8, rope=rope)
    fields = bridge.to_hf_config(config)
    assert bridge.from_hf_config(fields) == config
    for names in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        fewer = {name: value for name, value in fields.items() if name not in names}
        assert bridge.from_hf_config(fewer).rope == rope


def test_all_fields_survive_json():
    config = DecoderConfig(
        vocab_size=131,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=77,
        norm_eps=1e-5,
        rope=RopeConfig(1e6),
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=(5, 6),
        pad_token_id=0,
        dtype="bfloat16",
    )
    fields = bridge.to_hf_config(config)
    assert fields["dtype"] == fields["torch_dtype"] == "bfloat16"
    assert bridge.from_hf_config(json.loads(json.dumps(fields))) == config


def test_a_config_of_an_older_transformers_with_all_its_noise_is_read():
    noise = {
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
        "max_length": 4096,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0",
        "use_cache": True,
        "is_decoder": False,
        "pruned_heads": {},
    }
    assert bridge.from_hf_config(HF_CONFIG | noise).dtype == "float16"


def test_everything_that_is_not_modelled_is_named_in_one_error():
    fields = HF_CONFIG | {
        "hidden_act": "gelu",
        "kv_sharing_modes": ["x"],
        "quantization_config": {"bits": 4},
        "sliding_window": 128,
        "rope_scaling": {"rope_type": "spiral", "factor": 4.0},
        "dtype": "float32",
        "torch_dtype": "bfloat16",
    }
    del fields["hidden_size"]
    with pytest.raises(ValueError) as error:
        bridge.from_hf_config(fields)
    for line in (
        "hidden_size is missing",
        "hidden_act = 'gelu': only 'silu' is modelled",
        "kv_sharing_modes = ['x']",
        "quant_method None",
        "sliding_window = 128",
        "'spiral' is not modelled",
        "dtype and torch_dtype differ",
    ):
        assert line in str(error.value)


@pytest.mark.parametrize(
    "rope, match",
    [
        ({"rope_scaling": {"rope_type": "linear"}}, ["'linear'", "factor = None"]),
        (
            {"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}},
            ["rope_parameters", "['factor']"],
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0}},
            ["partial_rotary_factor = 0"],
        ),
        ({"rope_theta": -1e4}, ["rope_theta = -10000.0", "0"]),
        ({"rope_theta": "10000"}, ["rope_theta", "'10000'"]),
        (
            {"rope_parameters": {"full_attention": {}}},
            ["rope_parameters", "['full_attention']"],
        ),
        ({"rope_scaling": "linear"}, ["rope_scaling = 'linear'"]),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            ["rope_scaling", "rope_parameters", "'linear'", "'default'"],
        ),
    ],
)
def test_a_rope_that_is_unclear_is_refused(rope, match):
    with pytest.raises(ValueError, match=facts(*match)):
        bridge.from_hf_config(BASE | rope)


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"model_type": "rwkv"}, ["'rwkv'", "llama"]),
        ({"model_type": None}, ["model_type None", "llama"]),
        (
            {"architectures": ["LlamaForQuestionAnswering"]},
            ["['LlamaForQuestionAnswering']", "LlamaForCausalLM"],
        ),
        (
            {"num_attention_heads": 9},
            ["num_attention_heads 9", "num_key_value_heads 2"],
        ),
        ({"head_dim": 5}, ["head_dim 5"]),
        (
            {"vocab_size": "131", "hidden_size": 0},
            ["vocab_size", "'131'", "hidden_size", "0"],
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused(fields, match):
    with pytest.raises(ValueError, match=facts(*match)):
        bridge.from_hf_config(HF_CONFIG | fields)


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}'])
def test_a_config_file_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=facts("config.json'")):
        bridge.from_hf_config(tmp_path)


# Every family


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_of_any_family_survives_json(variant):
    config = bridge.from_hf_config(hf_fields(variant))
    fields = json.loads(json.dumps(bridge.to_hf_config(config)))
    assert bridge.from_hf_config(fields) == config
    assert hash(config) == hash(bridge.from_hf_config(fields))


# Whose files no transformers 4 reads.
OF_FIVE = {"mellum", "deepseek_v4", "mimo_v2_flash", "cohere_compass"}
OF_FIVE |= {"cohere_compass-turned", "laguna", "laguna-elements"}


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in OF_FIVE])
def test_transformers_4_reads_the_same_as_5(variant):
    config = bridge.from_hf_config(hf_fields(variant))
    fields = bridge.to_hf_config(config)
    old = {k: v for k, v in fields.items() if k not in ("rope_parameters", "dtype")}
    assert bridge.from_hf_config(old) == config


def test_all_families_of_the_table_are_tried():
    assert {VARIANTS[name]["model_type"] for name in VARIANTS} == set(FAMILY_TABLE)


def test_an_exponent_of_alibi_that_is_no_integer_is_written_as_it_is():
    config = bridge.from_hf_config(hf_fields("mpt"))
    config = dataclasses.replace(config, alibi_bias_max=8.5)
    assert bridge.from_hf_config(bridge.to_hf_config(config)) == config


def test_a_config_that_its_familys_files_cannot_say_is_not_written():
    config = bridge.from_hf_config(hf_fields("qwen3"))
    with pytest.raises(ValueError, match=facts("qk_norm = None", "'head'")):
        bridge.to_hf_config(dataclasses.replace(config, qk_norm=None))


@pytest.mark.parametrize(
    "variant, changes, match",
    [
        ("llama", {"rms_norm_eps": float("nan")}, ["norm_eps", "nan"]),
        ("llama", {"tie_word_embeddings": "false"}, ["tie_word_embeddings", "'false'"]),
        ("llama", {"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ("llama", {"num_hidden_layers": -3}, ["num_hidden_layers", "-3"]),
        ("qwen2-sliding", {"num_hidden_layers": "3"}, ["layer_types", "'str'"]),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 3},
            ["layer_types", "use_sliding_window"],
        ),
        ("gemma2", {"layer_types": ["full_attention"]}, ["layer_types", "1", "3"]),
        (
            "gemma2",
            {"layer_types": ["chunked"] * 3},
            ["layer_types", "('chunked', 'chunked', 'chunked')"],
        ),
        (
            "gemma3",
            {"rope_parameters": {"rope_theta": 1e4}},
            ["rope_parameters", "full_attention, sliding_attention"],
        ),
        (
            "phi3-longrope-long",
            {"hidden_act": "gelu"},
            ["hidden_act = 'gelu'", "'silu'"],
        ),
        (
            "mixtral",
            {"num_experts_per_tok": 6},
            ["num_experts_per_tok 6", "num_experts 5"],
        ),
        (
            "qwen3_moe",
            {"num_local_experts": 4},
            ["num_experts = 8", "num_local_experts = 4"],
        ),
        ("deepseek_v3", {"n_group": 3}, ["topk_group 2", "n_group 3", "8"]),
        (
            "deepseek_v3",
            {"topk_method": "greedy"},
            ["topk_method = 'greedy'", "'noaux_tc'"],
        ),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, ["topk_method = 'noaux_tc'"]),
        ("deepseek_v2", {"n_shared_experts": None}, ["n_shared_experts = None", "1"]),
        ("deepseek_v2", {"head_dim": 18}, ["head_dim = 18", "8"]),
        ("deepseek_v2", {"num_key_value_heads": 2}, ["mla", "num_key_value_heads 2"]),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            ["scale_attn_by_inverse_layer_idx = True", "False"],
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "2", "4"]),
    ],
)
def test_a_config_that_no_model_of_the_family_has_is_refused(variant, changes, match):
    with pytest.raises(ValueError, match=facts(*match)):
        bridge.from_hf_config(hf_fields(variant, **changes))


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"architectures": 3}, ["architectures 3", "LlamaForCausalLM"]),
        (
            {"architectures": "LlamaForCausalLM"},
            ["architectures LlamaForCausalLM", "'llama'"],
        ),
        ({"quantization_config": "fp8"}, ["quantization_config = 'fp8'"]),
        (
            {"quantization_config": {"quant_method": "bitnet"}},
            ["quantization_config", "'bitnet'", "fp8", "bfloat16"],
        ),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            ["quantization_config", "'hqq'", "fp8", "mxfp4"],
        ),
        ({"dtype": "pickle"}, ["dtype = 'pickle'", "float32"]),
        ({"torch_dtype": 3}, ["dtype = '3'", "float32"]),
        ({"rope_theta": 0}, ["rope_theta = 0"]),
        ({"initializer_range": -0.1}, ["initializer_range -0.1"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers 1,000,000,000", "1,000"]),
    ],
)
def test_a_damaged_value_is_refused_by_name(changes, match):
    with pytest.raises(ValueError, match=facts(*match)):
        bridge.from_hf_config(HF_CONFIG | changes)


def test_a_field_that_a_router_never_reads_is_refused():
    with pytest.raises(ValueError, match=facts("n_group", "softmax_of_chosen")):
        MoEConfig(4, 2, 8, scoring="softmax_of_chosen", n_group=2, topk_group=1)


def test_a_limit_that_python_writes_as_infinity_is_read(tmp_path):
    config = bridge.from_hf_config(hf_fields("mamba2"))
    fields = bridge.to_hf_config(config)
    assert fields["time_step_limit"][1] == float("inf")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    assert "Infinity]" in file.read_text()
    assert bridge.from_hf_config(tmp_path) == config
    file.write_text(json.dumps(fields | {"rms_norm_eps": [0.0, float("-inf")]}))
    with pytest.raises(ValueError, match=facts("JSON", "-Infinity")):
        bridge.from_hf_config(tmp_path)


def test_full_layers_of_gemma_4_may_be_like_the_others():
    config = bridge.from_hf_config(hf_fields("gemma4", per_layer_config={}))
    full = config.full_attention
    assert full is not None and full.head_dim == config.head_dim
    assert full.num_key_value_heads == config.num_key_value_heads


def test_key_heads_that_persimmon_says_and_nobody_reads_are_those_there_are():
    fields = hf_fields("persimmon")
    heads = fields["num_attention_heads"]
    said = bridge.from_hf_config(fields | {"num_key_value_heads": heads})
    assert said == bridge.from_hf_config(fields | {"num_key_value_heads": None})
    with pytest.raises(ValueError, match=facts("num_key_value_heads", 1, heads)):
        bridge.from_hf_config(fields | {"num_key_value_heads": 1})


def test_a_layer_that_recurrent_gemma_has_not_is_not_written():
    config = bridge.from_hf_config(hf_fields("recurrent_gemma"))
    types = ("full_attention", *config.layer_types[1:])
    other = dataclasses.replace(config, layer_types=types)
    with pytest.raises(ValueError, match=facts("'full_attention'", "block_types")):
        bridge.to_hf_config(other)
