"""Configs of transformers 4 and 5 mean the same, and nothing in them is dropped."""

import json

import pytest
from bridge_helpers import HF_CONFIG

import bridge
from bridge.models import DecoderConfig, RopeConfig

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


SPELLINGS = {
    "4": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "4, old key": {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    "5": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "5, theta outside": {
        "rope_theta": 5e5,
        "rope_parameters": {"rope_type": "llama3", **LLAMA3},
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_of_rope_is_read_alike(spelling):
    expected = RopeConfig(rope_theta=5e5, rope_type="llama3", **LLAMA3)
    assert bridge.from_hf_config(BASE | spelling).rope == expected


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig(5e5, "linear", 4.0),
        RopeConfig(5e5, "llama3", **LLAMA3),
    ],
)
def test_both_spellings_are_written_and_either_alone_is_enough(rope):
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
        rms_norm_eps=1e-5,
        rope=RopeConfig(1e6),
        attention_bias=True,
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
        "pretraining_tp": 2,
        "attention_dropout": 0.1,
        "quantization_config": {"bits": 4},
        "sliding_window": 128,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "dtype": "float32",
        "torch_dtype": "bfloat16",
    }
    del fields["hidden_size"]
    with pytest.raises(ValueError) as error:
        bridge.from_hf_config(fields)
    for line in (
        "hidden_size is missing",
        "hidden_act = 'gelu': only 'silu' is modelled",
        "pretraining_tp = 2: only 1",
        "attention_dropout = 0.1: only 0.0",
        "quantization_config = {'bits': 4}",
        "sliding_window = 128",
        "'yarn' is not modelled",
        "dtype and torch_dtype differ",
    ):
        assert line in str(error.value)


@pytest.mark.parametrize(
    "rope, match",
    [
        ({"rope_scaling": {"rope_type": "linear"}}, "factor = None: needed, not set"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}},
            "set, but never read",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear' is not an object"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "differ",
        ),
    ],
)
def test_a_rope_that_is_unclear_is_refused(rope, match):
    with pytest.raises(ValueError, match=match):
        bridge.from_hf_config(BASE | rope)


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; the supported ones are "),
        ({"model_type": None}, "None is not supported"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "LlamaForCausalLM"),
        ({"num_attention_heads": 9}, "not a multiple of num_key_value_heads 2"),
        ({"head_dim": 5}, "odd"),
        ({"vocab_size": "131", "hidden_size": 0}, "vocab_size .*\n.*hidden_size is 0"),
    ],
)
def test_a_config_that_cannot_be_is_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        bridge.from_hf_config(HF_CONFIG | fields)


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}'])
def test_a_config_file_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json'"):
        bridge.from_hf_config(tmp_path)
